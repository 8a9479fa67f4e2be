// Compiles a GatherMatmul to a program.
#include <algorithm>
#include <set>
#include <utility>

#include "exchange/mesh_exchange.h"
#include "products/blocks.h"
#include "products/compile.h"
#include "products/gemms.h"
#include "products/local_tensors.h"
#include "program/transfers.h"
#include "support/error.h"

namespace shardwright {
namespace {

// The input buffers of one product, besides the operand that moves; kMissingBuffer where it has none.
struct InputsOfProduct {
  BufferId other = kMissingBuffer;
  BufferId bias = kMissingBuffer;
  BufferId other_scales = kMissingBuffer;
};

// Emits one of the products. Multiplies the moved operand part by part, in the order in which the parts are received.
//
// If the parts are cut along a summed axis, several parts contribute to the same elements of the result: the first part
// writes them, later parts accumulate. Sums of 16-bit results are accumulated in a float32 buffer, which is cast at the
// end.
class ProductCompiler {
 public:
  // `operand` is the rank's part of the gathered operand. Creates the buffer of the result.
  ProductCompiler(ProgramBuilder& builder, const GatherMatmul::Product& product, DType result_dtype,
                  const Region& operand, const InputsOfProduct& inputs)
      : b_(builder), axes_(product.axes), result_dtype_(result_dtype), sizes_(axes_.num_axes(), 0) {
    const std::vector<int64_t> operand_shape = shape_of(operand);
    const std::vector<int64_t> other_shape = product.other.local_shape_of_rank(b_.rank());
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

  // Makes the result the next output of the program.
  void add_output() { b_.add_output(result_, out_shape_); }

  // Determines if parts accumulate. The caller passes all parts, in any order, before it multiplies the first one.
  void prepare(const std::vector<Selection::Part>& parts) {
    bool splits_sums = false;
    for (const Selection::Part& part : parts) {
      for (const size_t d : summed_dims_) splits_sums = splits_sums || part.sizes[d] != sizes_[axes_.lhs[d]];
    }
    if (!splits_sums) return;
    accumulates_ = true;
    if (result_dtype_.size_bytes() == 2) out_.buffer = b_.new_buffer(count(out_shape_), DType::kFloat32);
    if (!are_equal_or_disjoint(parts, free_dims_)) fill_with_bias();
  }

  // Writes the result of an operand without elements: zeros, plus the bias.
  void multiply_nothing() { emit_gemms(b_, axes_, sizes_, other_, other_, out_, false, bias_); }

  // Emits the product of one part. `operand` and `scales` are views of the part's elements and of their scales.
  void multiply(const Selection::Part& part, const TensorView& operand, const std::optional<TensorView>& scales) {
    std::vector<int64_t> sizes = sizes_;
    TensorView other = other_;
    TensorView out = out_;
    TensorView bias = bias_;
    const std::vector<int64_t>& offsets = part.in_receiver;  // of the part in the gathered operand, by dim
    for (size_t d = 0; d < axes_.lhs.size(); ++d) {
      const int axis = axes_.lhs[d];
      sizes[axis] = part.sizes[d];
      other.advance(axis, offsets[d]);
      out.advance(axis, offsets[d]);
      if (bias.buffer >= 0) bias.advance(axis, offsets[d]);
    }
    std::vector<int64_t> free_offsets;
    for (const size_t d : free_dims_) free_offsets.push_back(offsets[d]);
    const bool is_first = !accumulates_ || (!is_filled_ && written_.insert(free_offsets).second);
    const auto both = scales ? std::optional<ScaleViews>({*scales, other_scales_}) : std::nullopt;
    emit_gemms(b_, axes_, sizes, operand, other, out, !is_first, is_first ? bias : TensorView{}, both);
  }

  // Casts accumulated sums to the result's dtype.
  void finish() {
    if (out_.buffer != result_) b_.emit(Cast{b_.whole(out_.buffer), b_.whole(result_)});
  }

 private:
  static int64_t count(const std::vector<int64_t>& shape) {
    int64_t n = 1;
    for (const int64_t size : shape) n *= size;
    return n;
  }

  // Fills the result with the bias, or with zeros, so that all parts accumulate. This is needed where parts overlap
  // partly along the free dims: then no part is the first for all of its elements.
  void fill_with_bias() {
    std::vector<int64_t> sizes = sizes_;
    for (const size_t d : summed_dims_) sizes[axes_.lhs[d]] = 0;
    emit_gemms(b_, axes_, sizes, other_, other_, out_, false, bias_);
    is_filled_ = true;
  }

  ProgramBuilder& b_;
  const Contraction& axes_;
  DType result_dtype_;
  std::vector<int64_t> sizes_;       // by axis
  std::vector<size_t> summed_dims_;  // of the moved operand
  std::vector<size_t> free_dims_;    // of the moved operand
  std::vector<int64_t> out_shape_;
  TensorView other_;
  TensorView other_scales_;
  TensorView out_;  // the buffer that products write: the result, or float32 sums
  TensorView bias_;
  BufferId result_ = kMissingBuffer;
  bool accumulates_ = false;
  bool is_filled_ = false;
  std::set<std::vector<int64_t>> written_;  // offsets along the free dims of the parts that were multiplied
};

// Compiles the program of one rank. compile.h lists the instructions of a small example.
class GatherCompiler {
 public:
  GatherCompiler(const GatherMatmul& matmul, const Schedule& schedule, Rank rank)
      : matmul_(matmul),
        schedule_(schedule),
        plan_(matmul.plan),
        here_(*plan_.src.mesh().position_of(rank)),
        needed_(plan_.dst.region(here_)),
        b_(plan_.src.dtype(), plan_.lowering, plan_.named_groups_only, rank) {}

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
  // Declares the inputs in the order that GatherMatmul documents, and makes the compiler of each product.
  void declare_inputs() {
    const std::vector<BufferId> declared = shardwright::declare_inputs(b_, local_tensors(matmul_, b_.rank()));
    auto next = declared.begin() + 1;  // after the operand
    std::vector<InputsOfProduct> inputs(matmul_.products.size());
    for (InputsOfProduct& product_inputs : inputs) product_inputs.other = *next++;
    for (size_t j = 0; j < inputs.size(); ++j) {
      if (matmul_.products[j].has_bias) inputs[j].bias = *next++;
    }
    if (matmul_.scaling) {
      scales_ = *next++;
      for (InputsOfProduct& product_inputs : inputs) product_inputs.other_scales = *next++;
    }
    const DType result = matmul_.scaling ? matmul_.scaling->result : b_.program().dtype;
    for (size_t j = 0; j < inputs.size(); ++j) {
      products_.emplace_back(b_, matmul_.products[j], result, needed_, inputs[j]);
    }
  }

  // ---- scales of the operand

  // Emits the moves of row scales, as the first instructions of the program, without the Wait for their last transfer.
  void start_scales() {
    gathered_scales_ = scales_;
    if (!matmul_.scaling || !matmul_.scaling->plan) return;
    const Plan& plan = *matmul_.scaling->plan;
    const auto first_instruction = static_cast<int>(b_.program().instructions.size());
    gathered_scales_ = compile_steps(b_, plan, 0, plan.steps.size(), scales_, "scales, ");
    postponed_wait_ = b_.take_last_wait(first_instruction);
  }

  // Emits the Wait that start_scales postponed, if it was not emitted yet.
  void finish_scales() { b_.put_back(std::exchange(postponed_wait_, {})); }

  // Returns a view of the scales of a part. With `are_own`, the part is the rank's own, and its scales are an input,
  // which needs no Wait; otherwise they are among the gathered scales. Returns nullopt for products without scales.
  std::optional<TensorView> scales_of(const Selection::Part& part, const Contraction& axes, bool are_own) const {
    if (!matmul_.scaling) return std::nullopt;
    if (!matmul_.scaling->by_row) return scales_view(axes, axes.lhs, scales_, {});
    const Layout& layout = are_own ? matmul_.scaling->plan->src : matmul_.scaling->plan->dst;
    TensorView view =
        scales_view(axes, axes.lhs, are_own ? scales_ : gathered_scales_, layout.local_shape_of_rank(b_.rank()));
    for (const int d : free_dims_of(axes, axes.lhs))
      view.advance(axes.lhs[d], (are_own ? part.in_sender : part.in_receiver)[d]);
    return view;
  }

  // Multiplies the gathered operand at once.
  void multiply_whole() {
    const Selection all(needed_, needed_);
    if (all.count() == 0) {
      for (ProductCompiler& product : products_) product.multiply_nothing();
    }
    multiply(all, gathered_, 0, &Selection::Part::in_receiver, shape_of(needed_));
  }

  // Multiplies a block of the moved operand by all other operands. The block is in a row-major tensor of this shape,
  // which begins at `offset` of the buffer. `part_offsets` is the member of Selection::Part with the offsets of a part
  // in this tensor. With `has_own_scales`, the scales of the block are the rank's input scales.
  void multiply(const Selection& block, BufferId buffer, int64_t offset,
                std::vector<int64_t> Selection::Part::* part_offsets, const std::vector<int64_t>& shape,
                bool has_own_scales = false) {
    if (block.count() == 0) return;
    for (size_t j = 0; j < products_.size(); ++j) {
      const Contraction& axes = matmul_.products[j].axes;
      const TensorView buffer_view = row_major_view(buffer, axes.lhs, shape, axes.num_axes());
      for (const Selection::Part& part : block.parts()) {
        TensorView view = buffer_view;
        view.offset += offset;
        for (size_t d = 0; d < shape.size(); ++d) view.advance(axes.lhs[d], (part.*part_offsets)[d]);
        products_[j].multiply(part, view, scales_of(part, axes, has_own_scales));
      }
    }
  }

  // ---- in chunks

  // The transfer of one chunk.
  struct ChunkTransfer {
    struct ReceivedBlock {
      Selection block;     // the elements of the peer's part that are needed here
      size_t message = 0;  // index in set.receives
    };
    TransferSet set;
    TransferMethod transfer_method = TransferMethod::kMessages;
    std::vector<ReceivedBlock> received;  // in the order in which they are multiplied
    Ticket ticket = kNoTicket;            // once it is started
  };

  // Multiplies the rank's own part and the received chunks, while further chunks are in flight. `current` has the
  // rank's part before the chunked step.
  void multiply_by_chunks(const Step& step, BufferId current) {
    const Region held = step.before.region(here_);
    const std::vector<int64_t> group = plan_.src.mesh().group(here_, step.mesh_dims);
    const auto k = static_cast<int64_t>(group.size());
    const bool by_messages = schedule_.method == Method::kRing;
    const std::vector<Chunk> chunks = by_messages ? ring_chunks(k, schedule_) : collective_chunks(k, schedule_.chunks);
    // Shares are taken along a free dim of the first product if there is one, so that they do not split its sums.
    std::vector<size_t> dims;
    std::vector<size_t> all_dims;
    const Contraction& axes = matmul_.products[0].axes;
    for (size_t d = 0; d < axes.lhs.size(); ++d) {
      all_dims.push_back(d);
      if (!axes.is_summed(axes.lhs[d])) dims.push_back(d);
    }
    share_dim_ = dim_to_share(step.before, dims.empty() ? all_dims : dims, chunks.empty() ? 1 : chunks[0].shares);

    const Selection own(held, needed_);
    if (matmul_.keeps_gathered) gathered_ = b_.new_buffer(num_elements(needed_));
    std::vector<ChunkTransfer> transfers;
    for (const Chunk& chunk : chunks) transfers.push_back(transfer_of(step, group, chunk, current));
    prepare_products(transfers, own);
    lay_out_slots(transfers);
    const size_t depth = std::min(static_cast<size_t>(schedule_.depth), chunks.size());
    for (size_t c = 0; c < depth; ++c) start(transfers[c], c);
    b_.begin_chunk(0);
    const bool has_own_scales = plan_.steps.size() == 1;  // after earlier steps, the rank holds another part
    if (!has_own_scales) finish_scales();
    multiply(own, current, 0, &Selection::Part::in_sender, shape_of(held), has_own_scales);
    finish_scales();
    if (matmul_.keeps_gathered) b_.copy(current, gathered_, own.boxes(CopySide::local(), CopySide::local()));
    for (size_t c = 0; c < chunks.size(); ++c) {
      b_.begin_chunk(static_cast<int>(c) + 1);
      b_.wait(transfers[c].ticket);
      if (c + depth < chunks.size()) start(transfers[c + depth], c + depth);
      b_.begin_chunk(static_cast<int>(c) + 1);
      multiply_received(transfers[c]);
    }
    b_.begin_chunk(-1);
  }

  // ---- the memory of chunks from their receipt until they are multiplied

  // Sets the offsets of the slots in one buffer. Chunk c uses slot c modulo depth + 1; each slot is as long as its
  // longest chunk. With depth 1, chunks of 16, 24 and 8 elements have the slots [0, 16), [16, 40) and [0, 8).
  //
  // The buffer is allocated with the first transfer. A separate buffer for each chunk could reuse memory that earlier
  // products still read, and its transfer would have to wait for them.
  void lay_out_slots(const std::vector<ChunkTransfer>& transfers) {
    const size_t num_slots = std::min(static_cast<size_t>(schedule_.depth) + 1, transfers.size());
    std::vector<int64_t> lengths(num_slots, 0);
    for (size_t c = 0; c < transfers.size(); ++c) {
      const int64_t staged = transfers[c].set.receives.staged_count(staging_of_received(transfers[c].transfer_method));
      int64_t& length = lengths[c % num_slots];
      length = std::max(length, aligned(staged));
    }
    int64_t total = 0;
    for (const int64_t length : lengths) {
      slot_offsets_.push_back(total);
      total += length;
    }
    if (total > 0) slots_ = b_.new_buffer(total);
  }

  // Returns the staging memory of received data: a slot. Messages that are contiguous in the gathered operand are
  // received there directly if it is kept. The data of collectives is one run in the slot.
  Staging staging_of_received(TransferMethod transfer_method) const {
    const bool by_messages = transfer_method == TransferMethod::kMessages;
    return {.memory = Staging::Memory::kGiven,
            .may_stay = by_messages,
            .is_one_run = !by_messages,
            .alignment = by_messages ? aligned(1) : 1};
  }

  // Rounds a number of elements up to 16 bytes: some device kernels are slow, or refuse to run, unless matrices begin
  // at such addresses.
  int64_t aligned(int64_t count) const {
    constexpr int64_t kAlignmentBytes = 16;
    const int64_t items = std::max<int64_t>(kAlignmentBytes / plan_.src.dtype().size_bytes(), 1);
    return (count + items - 1) / items * items;
  }

  // Calls prepare() of all products with all parts of the operand. If the operand has no elements, writes the results.
  void prepare_products(const std::vector<ChunkTransfer>& transfers, const Selection& own) {
    std::vector<Selection::Part> parts = own.parts();
    for (const ChunkTransfer& transfer : transfers) {
      for (const ChunkTransfer::ReceivedBlock& received : transfer.received) {
        for (Selection::Part& part : received.block.parts()) parts.push_back(std::move(part));
      }
    }
    if (num_elements(needed_) == 0) {
      for (ProductCompiler& product : products_) product.multiply_nothing();
    }
    for (ProductCompiler& product : products_) product.prepare(parts);
  }

  // Returns this rank's index in the group.
  int64_t own_index(const std::vector<int64_t>& group) const {
    return std::find(group.begin(), group.end(), here_) - group.begin();
  }

  // Return the elements of a chunk that are received from, or sent to, the rank with index `member` in the group;
  // nullopt if there are none.
  std::optional<Selection> received_block(const Step& step, const std::vector<int64_t>& group, const Chunk& chunk,
                                          int64_t member) {
    const int64_t peer = group[member];
    if (!reads_from(step.before, step.mesh_dims, peer, here_)) return std::nullopt;
    return share_of(Selection(step.before.region(peer), needed_), share_dim_, chunk);
  }

  std::optional<Selection> sent_block(const Step& step, const std::vector<int64_t>& group, const Chunk& chunk,
                                      int64_t member) {
    const int64_t peer = group[member];
    if (!reads_from(step.before, step.mesh_dims, here_, peer)) return std::nullopt;
    return share_of(Selection(step.before.region(here_), step.after.region(peer)), share_dim_, chunk);
  }

  // Makes the transfer of a chunk, without starting it. `current` has the rank's part before the step.
  ChunkTransfer transfer_of(const Step& step, const std::vector<int64_t>& group, const Chunk& chunk, BufferId current) {
    const bool by_messages = schedule_.method == Method::kRing;
    const auto k = static_cast<int64_t>(group.size());
    const int64_t me = own_index(group);
    ChunkTransfer transfer;
    transfer.set.group = b_.group_index(step);
    transfer.transfer_method = by_messages ? TransferMethod::kMessages : TransferMethod::kAllToAll;
    const auto add_received = [&](int64_t member) {
      const auto block = received_block(step, group, chunk, member);
      if (!block) return;
      transfer.received.push_back({*block, transfer.set.receives.size()});
      transfer.set.receives.add(member, {{gathered_, block->slice(0, block->count())}});
    };
    const auto add_sent = [&](int64_t member) {
      const auto block = sent_block(step, group, chunk, member);
      if (block) transfer.set.sends.add(member, {{current, block->slice(0, block->count())}});
    };
    if (by_messages) {
      for (const int64_t d : chunk.distances) {
        add_received((me + d) % k);
        add_sent((me - d + k) % k);
      }
      return transfer;
    }
    for (int64_t m = 0; m < k; ++m) {
      if (m != me) add_received(m);
      if (m != me) add_sent(m);
    }
    if (step.op == StepOp::kAllGather)
      gather_if_even(transfer, share_of(own_part(step), share_dim_, chunk), k, me, current);
    return transfer;
  }

  // Returns the elements that this rank already has.
  Selection own_part(const Step& step) const { return {step.before.region(here_), needed_}; }

  // Makes the transfer of a chunk an all-gather if all ranks' shares are equally long and the lowering has all-gathers.
  // An all-gather also receives the rank's own share, `own`. `k` is the number of ranks, `me` this rank's index among
  // them. Every rank knows all lengths, so all ranks make the same choice.
  void gather_if_even(ChunkTransfer& transfer, const std::optional<Selection>& own, int64_t k, int64_t me,
                      BufferId current) const {
    if (!own) return;
    TransferSet& set = transfer.set;
    const Selection elements = own->slice(0, own->count());
    set.receives.insert(me, {{kMissingBuffer, elements}});
    const bool are_equal = static_cast<int64_t>(set.receives.size()) == k && set.receives.are_equally_long();
    if (!gathers_natively(b_.lowering(), are_equal)) return set.receives.remove(me);
    transfer.transfer_method = TransferMethod::kAllGather;
    set.sends = Messages(Messages::Side::kSent);
    set.sends.add(me, {{current, elements}});
    // The own share was inserted as message `me`, so later messages moved up by one.
    for (ChunkTransfer::ReceivedBlock& received : transfer.received) {
      if (static_cast<int64_t>(received.message) >= me) ++received.message;
    }
    std::rotate(transfer.received.begin(), transfer.received.begin() + me, transfer.received.end());  // nearest first
  }

  // Starts the transfer of the c-th chunk.
  void start(ChunkTransfer& transfer, size_t c) {
    b_.begin_chunk(static_cast<int>(c) + 1);
    Staging staging = staging_of_received(transfer.transfer_method);
    staging.given = {slots_, slot_offsets_[c % slot_offsets_.size()], 0};
    transfer.set.receives.choose_memory(b_, staging);
    if (transfer.transfer_method == TransferMethod::kAllToAll) {
      transfer.set.sends.choose_memory(b_, {.may_stay = false, .is_one_run = true});
    } else {
      transfer.set.sends.choose_memory(b_, {.memory = Staging::Memory::kApart});
    }
    transfer.set.sends.copy(b_);
    transfer.ticket = shardwright::start(b_, transfer.set, transfer.transfer_method);
  }

  // Multiplies a received chunk, which is in its slot or, if its messages were received there, in the gathered operand.
  void multiply_received(const ChunkTransfer& transfer) {
    const Messages& receives = transfer.set.receives;
    receives.copy(b_);
    for (const auto& [block, message] : transfer.received) {
      if (receives.is_staged(message)) {
        const BufferRange& range = receives.range(message);
        multiply(block, range.buffer, range.offset, &Selection::Part::packed, block.shape());
      } else {
        multiply(block, gathered_, 0, &Selection::Part::in_receiver, shape_of(needed_));
      }
    }
  }

  const GatherMatmul& matmul_;
  Schedule schedule_;
  const Plan& plan_;
  const Position here_;  // on the mesh of the plan
  const Region needed_;  // of the gathered operand
  ProgramBuilder b_;
  std::vector<ProductCompiler> products_;
  BufferId gathered_ = kMissingBuffer;
  BufferId slots_ = kMissingBuffer;
  std::vector<int64_t> slot_offsets_;
  BufferId scales_ = kMissingBuffer;  // of the operand
  BufferId gathered_scales_ = kMissingBuffer;
  std::vector<Instruction> postponed_wait_;  // the Wait for the scales' last transfer, and what follows it
  size_t share_dim_ = 0;                     // the dim along which chunks are shares of parts
};

}  // namespace

Program compile_gather(const GatherMatmul& matmul, const Schedule& schedule, Rank rank) {
  if (schedule.method == Method::kFlags) return compile_flagged(matmul, schedule, rank);
  return GatherCompiler(matmul, schedule, rank).run();
}

}  // namespace shardwright
