// GatherMatmul -> program.
#include <algorithm>
#include <set>
#include <utility>

#include "moves/exchange.h"
#include "products/blocks.h"
#include "products/compile.h"
#include "products/gemms.h"
#include "support/error.h"

namespace shardwright {
namespace {

struct InputsOfProduct {
  BufferId other = kMissingBuffer;
  BufferId bias = kMissingBuffer;
  BufferId other_scales = kMissingBuffer;
};

// One product, and what of its result has been written.
class ProductCompiler {
 public:
  ProductCompiler(ProgramBuilder& builder, const GatherMatmul::Product& product, DType result_dtype,
                  const Region& operand, const InputsOfProduct& inputs)
      : b_(builder), axes_(product.axes), result_dtype_(result_dtype), sizes_(axes_.num_axes(), 0) {
    const std::vector<int64_t> operand_shape = shape_of(operand);
    const std::vector<int64_t> other_shape = product.other.local_shape(b_.position());
    for (size_t d = 0; d < axes_.lhs.size(); ++d) sizes_[axes_.lhs[d]] = operand_shape[d];
    for (size_t d = 0; d < axes_.rhs.size(); ++d) sizes_[axes_.rhs[d]] = other_shape[d];
    for (size_t d = 0; d < axes_.lhs.size(); ++d) {
      (axes_.is_summed(axes_.lhs[d]) ? summed_dims_ : free_dims_).push_back(d);
    }
    for (const int axis : axes_.out) out_shape_.push_back(sizes_[axis]);
    out_ = row_major_view(b_.new_buffer(count(out_shape_), result_dtype_), axes_.out, out_shape_, axes_.num_axes());
    other_ = row_major_view(inputs.other, axes_.rhs, other_shape, axes_.num_axes());
    if (inputs.other_scales >= 0) {
      other_scales_ =
          scales_view(axes_, axes_.rhs, inputs.other_scales, b_.program().buffers[inputs.other_scales].shape);
    }
    if (product.has_bias) {
      bias_ = TensorView{inputs.bias, 0, std::vector<int64_t>(axes_.num_axes(), 0)};
      bias_.strides[axes_.out.back()] = 1;
    }
    result_ = out_.buffer;
  }

  void add_output() { b_.add_output(result_, out_shape_); }

  // To be called with all parts there will be, in any order, before the first is multiplied.
  void expect(const std::vector<Intersection::Part>& parts) {
    bool splits_sums = false;
    for (const Intersection::Part& part : parts) {
      for (const size_t d : summed_dims_) splits_sums = splits_sums || part.sizes[d] != sizes_[axes_.lhs[d]];
    }
    if (!splits_sums) return;
    accumulates_ = true;
    if (result_dtype_.size_bytes() == 2) out_.buffer = b_.new_buffer(count(out_shape_), DType::kFloat32);
    if (!are_equal_or_apart(parts, free_dims_)) begin_with_bias();
  }

  // An operand without elements sums to nothing.
  void multiply_nothing() { emit_gemms(b_, axes_, sizes_, other_, other_, out_, false, bias_); }

  // `operand`: where a part lies, and its scales if it has some. `at` is its place in the operand as gathered, by dim.
  void multiply(const Intersection::Part& part, const TensorView& operand, const std::optional<TensorView>& scales,
                const std::vector<int64_t>& at) {
    std::vector<int64_t> sizes = sizes_;
    TensorView other = other_;
    TensorView out = out_;
    TensorView bias = bias_;
    std::vector<int64_t> place;
    for (size_t d = 0; d < axes_.lhs.size(); ++d) {
      const int axis = axes_.lhs[d];
      sizes[axis] = part.sizes[d];
      other.advance(axis, at[d]);
      out.advance(axis, at[d]);
      if (bias.buffer >= 0) bias.advance(axis, at[d]);
    }
    for (const size_t d : free_dims_) place.push_back(at[d]);
    const bool is_first = !accumulates_ || (!is_filled_ && written_.insert(place).second);
    const auto both = scales ? std::optional<ScaleViews>({*scales, other_scales_}) : std::nullopt;
    emit_gemms(b_, axes_, sizes, operand, other, out, !is_first, is_first ? bias : TensorView{}, both);
  }

  void finish() {
    if (out_.buffer != result_) b_.emit(Cast{b_.whole(out_.buffer), b_.whole(result_)});
  }

 private:
  static int64_t count(const std::vector<int64_t>& shape) {
    int64_t n = 1;
    for (const int64_t size : shape) n *= size;
    return n;
  }

  // Parts meet each other's places: all are added to what is there.
  void begin_with_bias() {
    std::vector<int64_t> sizes = sizes_;
    for (const size_t d : summed_dims_) sizes[axes_.lhs[d]] = 0;
    emit_gemms(b_, axes_, sizes, other_, other_, out_, false, bias_);
    is_filled_ = true;
  }

  ProgramBuilder& b_;
  const Contraction& axes_;
  DType result_dtype_;
  std::vector<int64_t> sizes_;  // by axis
  std::vector<size_t> summed_dims_;
  std::vector<size_t> free_dims_;
  std::vector<int64_t> out_shape_;
  TensorView other_;
  TensorView other_scales_;
  TensorView out_;
  TensorView bias_;
  BufferId result_ = kMissingBuffer;
  bool accumulates_ = false;
  bool is_filled_ = false;
  std::set<std::vector<int64_t>> written_;  // places along the free dims
};

class GatherCompiler {
 public:
  GatherCompiler(const GatherMatmul& matmul, const Schedule& schedule, int64_t position)
      : matmul_(matmul),
        schedule_(schedule),
        plan_(matmul.plan),
        needed_(plan_.dst.region(position)),
        b_(plan_.src.mesh_ptr(), plan_.src.dtype(), plan_.backend, plan_.named_groups_only, position) {}

  Program run() {
    declare_inputs();
    start_scales();
    const size_t num_steps = plan_.steps.size();
    const bool is_serial = schedule_.method == Method::kSerial;
    const BufferId current = compile_steps(b_, plan_, 0, num_steps - (is_serial ? 0 : 1), kInputBuffer);
    if (is_serial) {
      b_.begin_step("the products");
      gathered_ = current;
      finish_scales();
      multiply_whole();
    } else {
      b_.begin_step(concat(step_text(plan_, num_steps - 1), ", ", method_name(schedule_.method), " of ",
                           schedule_.chunks, " chunks, ", schedule_.depth, " ahead, with its products"));
      b_.begin_exchanges(plan_.steps.back(), schedule_.chunks);
      multiply_by_chunks(plan_.steps.back(), current);
    }
    for (ProductCompiler& product : products_) {
      product.finish();
      product.add_output();
    }
    if (matmul_.keeps_gathered) b_.add_output(gathered_, shape_of(needed_));
    return std::move(b_.program());
  }

 private:
  void declare_inputs() {
    b_.new_input(plan_.src.local_shape(b_.position()));
    std::vector<InputsOfProduct> inputs(matmul_.products.size());
    for (size_t j = 0; j < inputs.size(); ++j) {
      const Layout& other = matmul_.products[j].other;
      inputs[j].other = b_.new_input(other.local_shape(b_.position()), other.dtype());
    }
    for (size_t j = 0; j < inputs.size(); ++j) {
      if (matmul_.products[j].has_bias) inputs[j].bias = b_.new_input({size_of_last_axis(matmul_.products[j])});
    }
    if (const auto& scaling = matmul_.scaling) {
      const std::vector<int64_t> one;
      scales_ = b_.new_input(scaling->plan ? scaling->plan->src.local_shape(b_.position()) : one, DType::kFloat32);
      for (size_t j = 0; j < inputs.size(); ++j) {
        inputs[j].other_scales =
            b_.new_input(scaling->by_row ? rows_of_other(matmul_.products[j]) : one, DType::kFloat32);
      }
    }
    const DType result = matmul_.scaling ? matmul_.scaling->result : b_.program().dtype;
    for (size_t j = 0; j < inputs.size(); ++j) {
      products_.emplace_back(b_, matmul_.products[j], result, needed_, inputs[j]);
    }
  }

  int64_t size_of_last_axis(const GatherMatmul::Product& product) const {
    const int axis = product.axes.out.back();
    const auto size_in = [&](const std::vector<int>& dims, const std::vector<int64_t>& shape) {
      return shape[std::find(dims.begin(), dims.end(), axis) - dims.begin()];
    };
    return has_axis(product.axes.lhs, axis) ? size_in(product.axes.lhs, shape_of(needed_))
                                            : size_in(product.axes.rhs, product.other.local_shape(b_.position()));
  }

  std::vector<int64_t> rows_of_other(const GatherMatmul::Product& product) const {
    return sizes_at(product.other.local_shape(b_.position()), free_dims_of(product.axes, product.axes.rhs));
  }

  // ---- scales of the operand

  // Those of rows set out ahead of everything else; nobody waits for the last of their transfers yet.
  void start_scales() {
    gathered_scales_ = scales_;
    if (!matmul_.scaling || !matmul_.scaling->plan) return;
    const Plan& plan = *matmul_.scaling->plan;
    const auto first_instruction = static_cast<int>(b_.program().instructions.size());
    gathered_scales_ = compile_steps(b_, plan, 0, plan.steps.size(), scales_, "scales, ");
    awaited_scales_ = b_.take_last_wait(first_instruction);
  }

  void finish_scales() { b_.put_back(std::exchange(awaited_scales_, {})); }

  // Of a part: as they were given where it is this rank's own, which nothing need be waited for, else as gathered.
  std::optional<TensorView> scales_of(const Intersection::Part& part, const Contraction& axes, bool are_own) const {
    if (!matmul_.scaling) return std::nullopt;
    if (!matmul_.scaling->by_row) return scales_view(axes, axes.lhs, scales_, {});
    const Layout& layout = are_own ? matmul_.scaling->plan->src : matmul_.scaling->plan->dst;
    TensorView view =
        scales_view(axes, axes.lhs, are_own ? scales_ : gathered_scales_, layout.local_shape(b_.position()));
    for (const int d : free_dims_of(axes, axes.lhs)) view.advance(axes.lhs[d], (are_own ? part.in_a : part.in_b)[d]);
    return view;
  }

  void multiply_whole() {
    const Intersection all(needed_, needed_);
    if (all.count() == 0) {
      for (ProductCompiler& product : products_) product.multiply_nothing();
    }
    multiply(all, gathered_, 0, &Intersection::Part::in_b, shape_of(needed_));
  }

  // A block whose parts lie in a row-major tensor of this shape, at these of their places.
  void multiply(const Intersection& block, BufferId buffer, int64_t offset,
                std::vector<int64_t> Intersection::Part::* places, const std::vector<int64_t>& shape,
                bool has_own_scales = false) {
    if (block.count() == 0) return;
    for (size_t j = 0; j < products_.size(); ++j) {
      const Contraction& axes = matmul_.products[j].axes;
      const TensorView whole = row_major_view(buffer, axes.lhs, shape, axes.num_axes());
      for (const Intersection::Part& part : block.parts()) {
        TensorView view = whole;
        view.offset += offset;
        for (size_t d = 0; d < shape.size(); ++d) view.offset += (part.*places)[d] * whole.strides[axes.lhs[d]];
        products_[j].multiply(part, view, scales_of(part, axes, has_own_scales), part.in_b);
      }
    }
  }

  // ---- in chunks

  struct Arrival {
    Intersection block;  // of a peer's part and what is needed here
    BufferRange range;
    bool is_in_place = false;  // in the operand as gathered
  };

  struct Transfer {
    Ticket ticket = kNoTicket;
    std::vector<Arrival> arrivals;
  };

  void multiply_by_chunks(const Step& step, BufferId current) {
    const Region held = step.before.region(b_.position());
    const Positions group = plan_.src.mesh().group(b_.position(), step.mesh_dims);
    const auto k = static_cast<int64_t>(group.size());
    const bool by_messages = schedule_.method == Method::kRing;
    const std::vector<Chunk> chunks = by_messages ? ring_chunks(k, schedule_) : collective_chunks(k, schedule_.chunks);
    // Of the dims that are rows or columns of the first product, so that shares do not split its sums.
    std::vector<size_t> dims;
    std::vector<size_t> all_dims;
    const Contraction& axes = matmul_.products[0].axes;
    for (size_t d = 0; d < axes.lhs.size(); ++d) {
      all_dims.push_back(d);
      if (!axes.is_summed(axes.lhs[d])) dims.push_back(d);
    }
    share_dim_ = dim_to_share(step.before, dims.empty() ? all_dims : dims, chunks.empty() ? 1 : chunks[0].shares);

    const Intersection own(held, needed_);
    expect_parts(step, group, chunks, own);
    if (matmul_.keeps_gathered) gathered_ = b_.new_buffer(num_elements(needed_));
    lay_out_slots(step, group, chunks);
    const size_t depth = std::min(static_cast<size_t>(schedule_.depth), chunks.size());
    std::vector<Transfer> transfers;
    for (size_t c = 0; c < depth; ++c) transfers.push_back(start(step, group, chunks, c, current));
    b_.begin_chunk(0);
    const bool has_own_scales = plan_.steps.size() == 1;  // else what is held is not what was given
    if (!has_own_scales) finish_scales();
    multiply(own, current, 0, &Intersection::Part::in_a, shape_of(held), has_own_scales);
    finish_scales();
    if (matmul_.keeps_gathered) b_.copy(current, gathered_, own.a_to_b(0, 0));
    for (size_t c = 0; c < chunks.size(); ++c) {
      b_.begin_chunk(static_cast<int>(c) + 1);
      b_.wait(transfers[c].ticket);
      if (c + depth < chunks.size()) transfers.push_back(start(step, group, chunks, c + depth, current));
      b_.begin_chunk(static_cast<int>(c) + 1);
      take_in(transfers[c]);
    }
    b_.begin_chunk(-1);
  }

  // ---- where chunks lie from their arrival until they are multiplied

  // Chunk c has slot c modulo depth + 1, each as long as the longest chunk in it. They are one buffer, whose life
  // begins with the first transfer: if each chunk had its own, a transfer that is started early would have to wait for
  // the products before it, whose memory it might have been given.
  void lay_out_slots(const Step& step, const Positions& group, const std::vector<Chunk>& chunks) {
    const size_t num_slots = std::min(static_cast<size_t>(schedule_.depth) + 1, chunks.size());
    std::vector<int64_t> lengths(num_slots, 0);
    const bool by_messages = schedule_.method == Method::kRing;
    for (size_t c = 0; c < chunks.size(); ++c) {
      even_shares_.push_back(by_messages ? std::nullopt : even_share(step, group, chunks[c]));
      int64_t& length = lengths[c % num_slots];
      length = std::max(length, staged_count(step, group, chunks[c], even_shares_[c]));
    }
    int64_t total = 0;
    for (const int64_t length : lengths) {
      slot_offsets_.push_back(total);
      total += length;
    }
    if (total > 0) slots_ = b_.new_buffer(total);
  }

  // Of its elements those that do not arrive in place, each block up to where the next may begin.
  int64_t staged_count(const Step& step, const Positions& group, const Chunk& chunk,
                       const std::optional<int64_t>& even_share) {
    if (even_share) return aligned(*even_share * static_cast<int64_t>(group.size()));
    const bool by_messages = schedule_.method == Method::kRing;
    int64_t count = 0;
    for (const int64_t d : chunk.distances) {
      const auto block = received(step, group, chunk, d);
      if (!block || (by_messages && run_in_gathered(*block) >= 0)) continue;
      count += by_messages ? aligned(block->count()) : block->count();
    }
    return aligned(count);
  }

  // Devices multiply fast, or at all, where matrices begin at such addresses.
  int64_t aligned(int64_t count) const {
    constexpr int64_t kAlignmentBytes = 16;
    const int64_t items = std::max<int64_t>(kAlignmentBytes / plan_.src.dtype().size_bytes(), 1);
    return (count + items - 1) / items * items;
  }

  BufferRange in_slot(size_t c, int64_t offset, int64_t count) const {
    return {slots_, slot_offsets_[c % slot_offsets_.size()] + offset, count};
  }

  // Where it lies in the gathered operand, if that is kept and holds it as one run; else -1.
  int64_t run_in_gathered(const Intersection& block) const { return matmul_.keeps_gathered ? block.run_in_b() : -1; }

  void expect_parts(const Step& step, const Positions& group, const std::vector<Chunk>& chunks,
                    const Intersection& own) {
    std::vector<Intersection::Part> parts = own.parts();
    for (const Chunk& chunk : chunks) {
      for (const int64_t d : chunk.distances) {
        if (const auto block = received(step, group, chunk, d)) {
          for (Intersection::Part& part : block->parts()) parts.push_back(std::move(part));
        }
      }
    }
    if (num_elements(needed_) == 0) {
      for (ProductCompiler& product : products_) product.multiply_nothing();
    }
    for (ProductCompiler& product : products_) product.expect(parts);
  }

  // Indices in the group.
  int64_t index_of(const Positions& group) const {
    return std::find(group.begin(), group.end(), b_.position()) - group.begin();
  }
  int64_t source(const Positions& group, int64_t distance) const {
    return (index_of(group) + distance) % static_cast<int64_t>(group.size());
  }
  int64_t target(const Positions& group, int64_t distance) const {
    const auto k = static_cast<int64_t>(group.size());
    return (index_of(group) - distance + k) % k;
  }

  // What a chunk brings from the rank at a distance, if anything.
  std::optional<Intersection> received(const Step& step, const Positions& group, const Chunk& chunk, int64_t distance) {
    const int64_t peer = group[source(group, distance)];
    if (source_for(step, peer, b_.position()) != peer) return std::nullopt;
    return share_of(Intersection(step.before.region(peer), needed_), share_dim_, chunk);
  }

  std::optional<Intersection> sent(const Step& step, const Positions& group, const Chunk& chunk, int64_t distance) {
    const int64_t peer = group[target(group, distance)];
    if (source_for(step, b_.position(), peer) != b_.position()) return std::nullopt;
    return share_of(Intersection(step.before.region(b_.position()), step.after.region(peer)), share_dim_, chunk);
  }

  Transfer start(const Step& step, const Positions& group, const std::vector<Chunk>& chunks, size_t c,
                 BufferId current) {
    b_.begin_chunk(static_cast<int>(c) + 1);
    if (schedule_.method == Method::kRing) return start_messages(step, group, chunks[c], c, current);
    if (even_shares_[c]) return start_all_gather(step, group, chunks[c], c, current, *even_shares_[c]);
    return start_all_to_all(step, group, chunks[c], c, current);
  }

  // The c-th chunk.
  Transfer start_messages(const Step& step, const Positions& group, const Chunk& chunk, size_t c, BufferId current) {
    Transfer transfer;
    int64_t staged = 0;
    SendReceive move{b_.group_index(step.mesh_dims), {}, {}};
    for (const int64_t d : chunk.distances) {
      if (const auto block = received(step, group, chunk, d)) {
        const int64_t run = run_in_gathered(*block);
        const bool is_in_place = run >= 0;
        const BufferRange range =
            is_in_place ? BufferRange{gathered_, run, block->count()} : in_slot(c, staged, block->count());
        if (!is_in_place) staged += aligned(block->count());
        transfer.arrivals.push_back({*block, range, is_in_place});
        move.receives.push_back({source(group, d), transfer.arrivals.back().range});
      }
      if (const auto block = sent(step, group, chunk, d)) {
        move.sends.push_back({target(group, d), run_or_packed(*block, current)});
      }
    }
    transfer.ticket = b_.send_receive(std::move(move));
    return transfer;
  }

  BufferRange run_or_packed(const Intersection& block, BufferId current) {
    const int64_t run = block.run_in_a();
    if (run >= 0) return {current, run, block.count()};
    const BufferId packed = b_.new_buffer(block.count());
    b_.copy(current, packed, block.a_to_packed(0, 0));
    return b_.whole(packed);
  }

  // Where the backend's own all-gather brings a chunk: how much each rank gives, which is the same on all.
  std::optional<int64_t> even_share(const Step& step, const Positions& group, const Chunk& chunk) const {
    if (!b_.backend().gathers || step.op != StepOp::kAllGather) return std::nullopt;
    std::optional<int64_t> count;
    for (const int64_t member : group) {
      const Region part = step.before.region(member);
      const int64_t here = Intersection(part, part).share(share_dim_, chunk.share, chunk.shares).count();
      if (count && *count != here) return std::nullopt;
      count = here;
    }
    return *count > 0 ? count : std::nullopt;
  }

  Transfer start_all_gather(const Step& step, const Positions& group, const Chunk& chunk, size_t c, BufferId current,
                            int64_t count) {
    const auto k = static_cast<int64_t>(group.size());
    const Region held = step.before.region(b_.position());
    const BufferRange own =
        run_or_packed(Intersection(held, held).share(share_dim_, chunk.share, chunk.shares), current);
    Transfer transfer;
    for (int64_t d = 1; d < k; ++d) {
      transfer.arrivals.push_back(
          {*received(step, group, chunk, d), in_slot(c, source(group, d) * count, count), false});
    }
    transfer.ticket = b_.emit(AllGather{b_.group_index(step.mesh_dims), own, in_slot(c, 0, count * k)});
    return transfer;
  }

  Transfer start_all_to_all(const Step& step, const Positions& group, const Chunk& chunk, size_t c, BufferId current) {
    const auto k = static_cast<int64_t>(group.size());
    Transfer transfer;
    AllToAll move{b_.group_index(step.mesh_dims), {}, {}, std::vector<int64_t>(k, 0), std::vector<int64_t>(k, 0)};
    std::vector<std::optional<Intersection>> sends(k);
    std::vector<std::optional<Intersection>> receives(k);
    for (int64_t d = 1; d < k; ++d) {
      sends[target(group, d)] = sent(step, group, chunk, d);
      receives[source(group, d)] = received(step, group, chunk, d);
    }
    std::vector<Box> pack;
    int64_t to_send = 0;
    int64_t to_receive = 0;
    for (int64_t m = 0; m < k; ++m) {
      if (sends[m]) {
        append(pack, sends[m]->a_to_packed(0, to_send));
        to_send += move.send_counts[m] = sends[m]->count();
      }
      if (receives[m]) {
        move.receive_counts[m] = receives[m]->count();
        transfer.arrivals.push_back({*receives[m], in_slot(c, to_receive, receives[m]->count()), false});
        to_receive += receives[m]->count();
      }
    }
    const BufferId send_staging = b_.new_buffer(to_send);
    b_.copy(current, send_staging, std::move(pack));
    move.src = b_.whole(send_staging);
    move.dst = to_receive > 0 ? in_slot(c, 0, to_receive) : b_.whole(b_.new_buffer(0));
    transfer.ticket = b_.emit(std::move(move));
    return transfer;
  }

  // Multiplies from where it came, or from its place if that is kept.
  void take_in(const Transfer& transfer) {
    std::vector<Box> boxes;
    BufferId staging = kMissingBuffer;
    for (const Arrival& arrival : transfer.arrivals) {
      if (!matmul_.keeps_gathered || arrival.is_in_place) continue;
      if (staging >= 0 && staging != arrival.range.buffer) {
        b_.copy(staging, gathered_, std::move(boxes));
        boxes.clear();
      }
      staging = arrival.range.buffer;
      append(boxes, arrival.block.packed_to_b(arrival.range.offset, 0));
    }
    b_.copy(staging, gathered_, std::move(boxes));
    for (const Arrival& arrival : transfer.arrivals) {
      if (arrival.is_in_place) {
        multiply(arrival.block, gathered_, 0, &Intersection::Part::in_b, shape_of(needed_));
      } else {
        multiply(arrival.block, arrival.range.buffer, arrival.range.offset, &Intersection::Part::packed,
                 arrival.block.shape());
      }
    }
  }

  const GatherMatmul& matmul_;
  Schedule schedule_;
  const Plan& plan_;
  Region needed_;
  ProgramBuilder b_;
  std::vector<ProductCompiler> products_;
  BufferId gathered_ = kMissingBuffer;
  BufferId slots_ = kMissingBuffer;  // buffer
  std::vector<int64_t> slot_offsets_;
  std::vector<std::optional<int64_t>> even_shares_;  // by chunk, as even_share answers
  BufferId scales_ = kMissingBuffer;                 // buffers, of the operand's
  BufferId gathered_scales_ = kMissingBuffer;
  std::vector<Instruction> awaited_scales_;
  size_t share_dim_ = 0;
};

}  // namespace

Program compile_gather(const GatherMatmul& matmul, const Schedule& schedule, int64_t position) {
  return GatherCompiler(matmul, schedule, position).run();
}

}  // namespace shardwright
