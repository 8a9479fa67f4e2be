// Compiles a MatmulScatter to a program.
#include <algorithm>

#include "exchange/mesh_exchange.h"
#include "moves/collectives.h"
#include "products/blocks.h"
#include "products/compile.h"
#include "products/gemms.h"
#include "products/local_tensors.h"
#include "program/transfers.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Compiles the program of one rank. compile.h lists the instructions of a small example.
class ScatterCompiler {
 public:
  ScatterCompiler(const MatmulScatter& matmul, const Schedule& schedule, Rank rank)
      : matmul_(matmul),
        schedule_(schedule),
        plan_(matmul.plan),
        here_(*plan_.src.mesh().position_of(rank)),
        held_(plan_.src.region(here_)),
        b_(plan_.src.dtype(), plan_.lowering, plan_.named_groups_only, rank) {}

  Program run() {
    declare_inputs();
    BufferId current = kMissingBuffer;
    size_t done = 0;
    if (schedule_.method == Method::kSerial) {
      b_.begin_step("the products");
      current = b_.new_buffer(num_elements(held_));
      multiply(Selection(held_, held_), current, 0, &Selection::Part::in_sender, shape_of(held_));
    } else {
      const Step& step = plan_.steps[0];
      b_.begin_step(concat(step_text(plan_, 0), ", ", method_name(schedule_.method), " of ", schedule_.chunks,
                           " chunks, ", schedule_.depth, " under way, with its products"));
      b_.begin_exchanges(step, schedule_.chunks);
      current = b_.new_buffer(num_elements(step.after.region(here_)));
      if (step.op == StepOp::kAllReduce) {
        all_reduce(step, current);
      } else {
        scatter(step, current);
      }
      b_.begin_chunk(-1);
      done = 1;
    }
    current = compile_steps(b_, plan_, done, plan_.steps.size(), current);
    b_.add_output(current, plan_.dst.local_shape_of_rank(b_.rank()));
    return std::move(b_.program());
  }

 private:
  // Declares the inputs in the order that MatmulScatter documents.
  void declare_inputs() {
    const std::vector<BufferId> declared = shardwright::declare_inputs(b_, local_tensors(matmul_, b_.rank()));
    auto next = declared.begin() + 2 * static_cast<int64_t>(matmul_.terms.size());  // after the operands
    if (matmul_.has_addend) addend_ = *next++;
    if (!matmul_.scaling) return;
    for (const auto& term : matmul_.terms) {
      const BufferId lhs = *next++;
      const BufferId rhs = *next++;
      scales_.push_back({scales_view(term.axes, term.axes.lhs, lhs, b_.program().buffers[lhs].shape),
                         scales_view(term.axes, term.axes.rhs, rhs, b_.program().buffers[rhs].shape)});
    }
  }

  // Computes a block of this rank's result: the addend plus all products. Writes it to a row-major tensor of this
  // shape, which begins at `offset` of the buffer. `out_offsets` is the member of Selection::Part with the offsets of a
  // part in this tensor; Part::in_sender has its offsets in the rank's full result.
  void multiply(const Selection& block, BufferId buffer, int64_t offset,
                std::vector<int64_t> Selection::Part::* out_offsets, const std::vector<int64_t>& shape) {
    if (block.count() == 0) return;
    if (addend_ >= 0) copy_addend(block, buffer, offset, out_offsets, shape);
    for (const Selection::Part& part : block.parts()) {
      for (size_t j = 0; j < matmul_.terms.size(); ++j) multiply(part, j, buffer, offset, part.*out_offsets, shape);
    }
  }

  // Emits the copy of the block's elements of the addend to the tensor that multiply() writes.
  void copy_addend(const Selection& block, BufferId buffer, int64_t offset,
                   std::vector<int64_t> Selection::Part::* out_offsets, const std::vector<int64_t>& shape) {
    const std::vector<int64_t> src_strides = row_major_strides(shape_of(held_));
    const std::vector<int64_t> dst_strides = row_major_strides(shape);
    std::vector<Box> boxes;
    for (const Selection::Part& part : block.parts()) {
      Box box{0, offset, part.sizes, src_strides, dst_strides};
      for (size_t d = 0; d < shape.size(); ++d) {
        box.src_offset += part.in_sender[d] * src_strides[d];
        box.dst_offset += (part.*out_offsets)[d] * dst_strides[d];
      }
      box.simplify();
      boxes.push_back(std::move(box));
    }
    b_.copy(addend_, buffer, std::move(boxes));
  }

  // Emits one term's product for one part. The first term writes the part, unless the part already holds the addend;
  // the other terms accumulate.
  void multiply(const Selection::Part& part, size_t term_index, BufferId buffer, int64_t offset,
                const std::vector<int64_t>& out_offsets, const std::vector<int64_t>& shape) {
    const MatmulScatter::Term& term = matmul_.terms[term_index];
    const Contraction& axes = term.axes;
    const auto operand_of = [](size_t index) { return static_cast<BufferId>(index); };  // operands are the first inputs
    const auto operand = [&](BufferId input, const std::vector<int>& dims) {
      return row_major_view(input, dims, b_.program().buffers[input].shape, axes.num_axes());
    };
    TensorView lhs = operand(operand_of(2 * term_index), axes.lhs);
    TensorView rhs = operand(operand_of(2 * term_index + 1), axes.rhs);
    TensorView out = row_major_view(buffer, axes.out, shape, axes.num_axes());
    out.offset += offset;
    std::optional<ScaleViews> scales;
    if (matmul_.scaling) scales = scales_[term_index];
    std::vector<int64_t> sizes(axes.num_axes(), 0);
    for (size_t d = 0; d < axes.lhs.size(); ++d) {
      sizes[axes.lhs[d]] = b_.program().buffers[lhs.buffer].shape[d];
    }
    for (size_t d = 0; d < axes.out.size(); ++d) {
      const int axis = axes.out[d];
      sizes[axis] = part.sizes[d];
      lhs.advance(axis, part.in_sender[d]);
      rhs.advance(axis, part.in_sender[d]);
      out.advance(axis, out_offsets[d]);
      if (scales) scales->lhs.advance(axis, part.in_sender[d]);
      if (scales) scales->rhs.advance(axis, part.in_sender[d]);
    }
    emit_gemms(b_, axes, sizes, lhs, rhs, out, term_index > 0 || addend_ >= 0, {}, scales);
  }

  // ---- reduce-scatters and moves of data

  // A function that emits the Wait for the transfer of one chunk, and the copies of received data into the result.
  using Finish = std::function<void()>;

  // Multiplies and sends in chunks, for a step other than an all-reduce. Writes the rank's part after the step to the
  // buffer `next`.
  void scatter(const Step& step, BufferId next) {
    step_ = &step;
    next_ = next;
    group_ = plan_.src.mesh().group(here_, step.mesh_dims);
    me_ = std::find(group_.begin(), group_.end(), here_) - group_.begin();
    needed_ = step.after.region(here_);
    reduces_ = step.op == StepOp::kReduceScatter;
    const auto k = static_cast<int64_t>(group_.size());
    const bool by_messages = schedule_.method == Method::kRing;
    const std::vector<Chunk> chunks = by_messages ? ring_chunks(k, schedule_) : collective_chunks(k, schedule_.chunks);
    shares_ = chunks.empty() ? 1 : chunks[0].shares;
    std::vector<size_t> dims(needed_.size());
    for (size_t d = 0; d < dims.size(); ++d) dims[d] = d;
    if (!dims.empty()) share_dim_ = dim_to_share(step.after, dims, shares_);
    if (by_messages && reduces_) contributions_.resize(shares_, std::vector<BufferRange>(k));

    const auto depth = static_cast<size_t>(schedule_.depth);
    std::vector<Finish> transfers;
    size_t num_finished = 0;
    for (size_t c = 0; c < chunks.size(); ++c) {
      b_.begin_chunk(static_cast<int>(c));
      transfers.push_back(by_messages ? start_messages(chunks[c]) : start_collective(chunks[c]));
      if (c >= depth) transfers[num_finished++]();
    }
    b_.begin_chunk(static_cast<int>(chunks.size()));
    if (by_messages || !reduces_) multiply_own();
    while (num_finished < transfers.size()) transfers[num_finished++]();
    if (by_messages && reduces_) reduce_contributions();
  }

  // Returns the index in the group of the rank at this distance.
  int64_t at_distance(int64_t distance) const {
    const auto k = static_cast<int64_t>(group_.size());
    return (me_ + distance + k) % k;
  }

  // Return the elements of a chunk that are sent to, or received from, the rank with this index in the group; nullopt
  // if there are none.
  std::optional<Selection> sent_block(int64_t index, const Chunk& chunk) const {
    if (!reduces_ && !reads_from(step_->before, step_->mesh_dims, here_, group_[index])) return std::nullopt;
    return share_of(Selection(held_, step_->after.region(group_[index])), share_dim_, chunk);
  }

  std::optional<Selection> received_block(int64_t index, const Chunk& chunk) const {
    if (!reduces_ && !reads_from(step_->before, step_->mesh_dims, group_[index], here_)) return std::nullopt;
    return share_of(Selection(step_->before.region(group_[index]), needed_), share_dim_, chunk);
  }

  // Computes a chunk's blocks and starts sending them as messages. Received contributions to a reduction stay in
  // staging memory until all are received.
  Finish start_messages(const Chunk& chunk) {
    TransferSet set{b_.group_index(*step_)};
    std::vector<Selection> blocks;
    for (const int64_t d : chunk.distances) {
      const int64_t target = at_distance(d);
      const int64_t source = at_distance(-d);
      if (const auto block = sent_block(target, chunk)) add_product(set.sends, blocks, target, *block);
      if (const auto block = received_block(source, chunk)) {
        set.receives.add(source, {{reduces_ ? kMissingBuffer : next_, block->slice(0, block->count())}});
      }
    }
    set.sends.choose_memory(b_, {.memory = Staging::Memory::kApart});
    multiply(set.sends, blocks);
    set.receives.choose_memory(b_, {.memory = Staging::Memory::kApart});
    for (size_t i = 0; i < set.receives.size() && reduces_; ++i) {
      contributions_[chunk.share][set.receives.peer(i)] = set.receives.range(i);
    }
    return start_and_unpack(std::move(set), TransferMethod::kMessages);
  }

  // Adds a message to `sends`, whose elements will be computed directly in its staging memory, and its block to
  // `blocks`.
  static void add_product(Messages& sends, std::vector<Selection>& blocks, int64_t target, const Selection& block) {
    sends.add(target, {{kMissingBuffer, block.slice(0, block.count())}});
    blocks.push_back(block);
  }

  // Computes each message's block into its staging memory.
  void multiply(const Messages& sends, const std::vector<Selection>& blocks) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      const BufferRange& range = sends.range(i);
      multiply(blocks[i], range.buffer, range.offset, &Selection::Part::packed, blocks[i].shape());
    }
  }

  // Starts the transfer of a chunk. The returned function waits for it and unpacks the received messages.
  Finish start_and_unpack(TransferSet set, TransferMethod transfer_method) {
    const Ticket ticket = start(b_, set, transfer_method);
    return [this, ticket, receives = std::move(set.receives)] {
      b_.wait(ticket);
      receives.copy(b_);
    };
  }

  // Computes the rank's own part: as its own contribution to a reduction, or else directly in the result.
  void multiply_own() {
    for (int64_t s = 0; s < shares_; ++s) {
      const auto block = share_of(Selection(held_, needed_), share_dim_, {{}, s, shares_});
      if (!block) continue;
      if (reduces_) {
        const BufferId staging = b_.new_buffer(block->count());
        multiply(*block, staging, 0, &Selection::Part::packed, block->shape());
        contributions_[s][me_] = b_.whole(staging);
      } else {
        multiply(*block, next_, 0, &Selection::Part::in_receiver, shape_of(needed_));
      }
    }
  }

  // Reduces all contributions of a ring at once, in the order of positions. Sums in the order of receipt (nearest
  // first) would have other bits on each rank, so replicas would differ, and a ring would differ from a collective.
  void reduce_contributions() {
    const Mesh& mesh = plan_.src.mesh();
    for (int64_t s = 0; s < shares_; ++s) {
      const auto block = share_of(Selection(held_, needed_), share_dim_, {{}, s, shares_});
      if (block) reduce_into_result(*block, by_position(mesh, mesh.ranks_at(group_), contributions_[s]));
    }
  }

  // Writes the reduction of the parts to the block's elements of the result.
  void reduce_into_result(const Selection& block, std::vector<BufferRange> parts) {
    const int64_t offset = block.contiguous_in_receiver();  // -1: the block is not contiguous
    const BufferRange result =
        offset >= 0 ? BufferRange{next_, offset, block.count()} : b_.whole(b_.new_buffer(block.count()));
    reduce_parts(b_, reduction_of(*step_), std::move(parts), result);
    if (offset < 0) b_.copy(result.buffer, next_, block.boxes(CopySide::packed(), CopySide::local()));
  }

  // Computes a chunk's blocks and starts the collective that sends them: a reduce-scatter or an all-to-all.
  Finish start_collective(const Chunk& chunk) {
    const auto k = static_cast<int64_t>(group_.size());
    TransferSet set{b_.group_index(*step_)};
    std::vector<Selection> blocks;
    for (int64_t m = 0; m < k; ++m) {
      if (m == me_ && !reduces_) continue;
      if (const auto block = sent_block(m, chunk)) add_product(set.sends, blocks, m, *block);
      if (reduces_) continue;
      if (const auto block = received_block(m, chunk)) set.receives.add(m, {{next_, block->slice(0, block->count())}});
    }
    const Staging one_run{.may_stay = false, .is_one_run = true};
    set.sends.choose_memory(b_, one_run);
    multiply(set.sends, blocks);
    if (reduces_) return start_reduction(set, sent_block(me_, chunk));
    set.receives.choose_memory(b_, one_run);
    return start_and_unpack(std::move(set), TransferMethod::kAllToAll);
  }

  // Starts the reduction of the staged contributions, one per rank in the group's order. `own` is the block that this
  // rank receives.
  Finish start_reduction(const TransferSet& set, const std::optional<Selection>& own) {
    const bool are_equally_long = set.sends.size() == group_.size() && set.sends.are_equally_long();
    const int64_t offset = own ? own->contiguous_in_receiver() : 0;  // -1: the block is not contiguous
    const int64_t count = own ? own->count() : 0;
    const BufferRange result = offset >= 0 ? BufferRange{next_, offset, count} : b_.whole(b_.new_buffer(count));
    const Finish sum = start_sum(b_, *step_, set.group, set.sends, are_equally_long, result);
    return [this, sum, own, offset, result] {
      sum();
      if (offset < 0) b_.copy(result.buffer, next_, own->boxes(CopySide::packed(), CopySide::local()));
    };
  }

  // ---- all-reduces: chunks are shares of the outermost dim that is longer than one, so each is contiguous

  // Computes and all-reduces the result in chunks. A pipeline: in round t, chunk t is computed and its first transfer
  // starts; stage s of chunk t - s * depth follows. With 3 chunks, 2 stages and depth 1 the rounds are (chunk.stage)
  //
  //   0.0   |   1.0, 0.1   |   2.0, 1.1   |   2.1
  void all_reduce(const Step& step, BufferId next) {
    const Selection all(held_, held_);
    if (all.count() == 0) return;
    const int g = b_.group_index(step);
    const bool is_native = reduces_natively(step, b_.lowering());
    const ReductionSpec reduction = reduction_of(step);
    size_t dim = 0;
    while (dim + 1 < all.shape().size() && all.shape()[dim] == 1) ++dim;
    std::vector<ReductionStages> chunks;
    std::vector<std::function<void()>> products;
    const int64_t shares = all.shape().empty() ? 1 : std::min(schedule_.chunks, all.shape()[dim]);
    for (int64_t c = 0; c < shares; ++c) {
      const Selection block = all.shape().empty() ? all : all.share(dim, c, shares);
      const BufferRange result{next, block.contiguous_in_sender(), block.count()};
      const BufferRange contribution = is_native ? result : b_.whole(b_.new_buffer(block.count()));
      products.push_back([=, this] {
        multiply(block, contribution.buffer, contribution.offset, &Selection::Part::packed, block.shape());
      });
      chunks.push_back(is_native ? native_all_reduce(b_, g, reduction, result)
                                 : composed_all_reduce(b_, g, reduction, contribution, result));
    }
    const auto num_stages = static_cast<int64_t>(chunks[0].size());
    const int64_t depth = std::min(schedule_.depth, shares);
    for (int64_t t = 0; t < shares + (num_stages - 1) * depth; ++t) {
      // The newest chunk comes first, so the transfers of older chunks overlap with its product.
      for (int64_t stage = 0; stage < num_stages; ++stage) {
        const int64_t c = t - stage * depth;
        if (c < 0 || c >= shares) continue;
        b_.begin_chunk(static_cast<int>(c));
        if (stage == 0) products[c]();
        chunks[c][stage]();
      }
    }
  }

  const MatmulScatter& matmul_;
  Schedule schedule_;
  const Plan& plan_;
  const Position here_;  // on the mesh of the plan
  const Region held_;    // of the result before the plan
  ProgramBuilder b_;
  BufferId addend_ = kMissingBuffer;
  std::vector<ScaleViews> scales_;  // by term
  // The state of the chunked step, set by scatter().
  const Step* step_ = nullptr;
  std::vector<int64_t> group_;      // positions
  int64_t me_ = 0;                  // this rank's index in the group
  Region needed_;                   // of the result after the step
  BufferId next_ = kMissingBuffer;  // the result after the step
  bool reduces_ = false;
  size_t share_dim_ = 0;  // the dim along which chunks are shares of parts
  int64_t shares_ = 1;
  std::vector<std::vector<BufferRange>> contributions_;  // of a ring, by share and by index in the group
};

}  // namespace

Program compile_scatter(const MatmulScatter& matmul, const Schedule& schedule, Rank rank) {
  return ScatterCompiler(matmul, schedule, rank).run();
}

}  // namespace shardwright
