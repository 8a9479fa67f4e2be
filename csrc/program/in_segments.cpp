#include "program/in_segments.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "moves/segments.h"
#include "program/builder.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Gives every buffer that an operation names another number.
class Renumbered {
 public:
  explicit Renumbered(const std::vector<BufferId>& to) : to_(to) {}

  void operator()(Copy& o) const { each(o.src, o.dst); }
  void operator()(FillZero& o) const { each(o.dst.buffer); }
  void operator()(Divide& o) const { each(o.dst.buffer); }
  void operator()(Power& o) const { each(o.src.buffer, o.dst.buffer); }
  void operator()(Reduce& o) const {
    for (BufferRange& part : o.parts) each(part.buffer);
    each(o.dst.buffer);
  }
  void operator()(Cast& o) const { each(o.src.buffer, o.dst.buffer); }
  template <IsOneOf<Gemm, Attend, AttendBackward, Merge, Accumulate, Offer, Fetch> Product>
  void operator()(Product&) const {
    throw InvariantError("an instruction of products in a plan");
  }
  void operator()(AllGather& o) const { each(o.src.buffer, o.dst.buffer); }
  void operator()(ReduceScatter& o) const { each(o.src.buffer, o.dst.buffer); }
  void operator()(AllReduce& o) const { each(o.data.buffer); }
  void operator()(AllToAll& o) const { each(o.src.buffer, o.dst.buffer); }
  void operator()(SendReceive& o) const {
    for (auto* messages : {&o.sends, &o.receives}) {
      for (SendReceive::Message& message : *messages) each(message.range.buffer);
    }
  }
  void operator()(Wait&) const {}

 private:
  template <typename... Ids>
  void each(Ids&... ids) const {
    ((ids = ids < 0 ? ids : to_[ids]), ...);
  }

  const std::vector<BufferId>& to_;
};

// Where a segment's elements are in a rank's part: the same stretch of every cell of one dim.
class SegmentOfPart {
 public:
  SegmentOfPart(const std::vector<int64_t>& shape, const Segments& segments, int64_t cell)
      : stretch_(cell / segments.count), cells_(shape[segments.tensor_dim] / cell) {
    for (int t = 0; t < static_cast<int>(shape.size()); ++t) {
      if (t < segments.tensor_dim) before_ *= shape[t];
      if (t > segments.tensor_dim) after_ *= shape[t];
    }
    cell_ = cell;
  }

  std::vector<Box> from_part(int64_t segment) const {
    if (before_ * cells_ * after_ == 0) return {};
    Box box{segment * stretch_ * after_,
            0,
            {before_, cells_, stretch_ * after_},
            {cells_ * cell_ * after_, cell_ * after_, 1},
            {cells_ * stretch_ * after_, stretch_ * after_, 1}};
    simplify(box);
    return {std::move(box)};
  }

  std::vector<Box> to_part(int64_t segment) const {
    std::vector<Box> boxes = from_part(segment);
    for (Box& box : boxes) {
      std::swap(box.src_offset, box.dst_offset);
      std::swap(box.src_strides, box.dst_strides);
    }
    return boxes;
  }

 private:
  int64_t stretch_;
  int64_t cells_;
  int64_t cell_ = 1;
  int64_t before_ = 1;
  int64_t after_ = 1;
};

// In which slot each instruction of a segment is, counted from the segment's first.
std::vector<int64_t> slots_of(const Program& segment) {
  std::vector<int64_t> slots;
  std::vector<bool> has_waited(segment.step_texts.size());
  for (const Instruction& instruction : segment.instructions) {
    if (std::holds_alternative<Wait>(instruction.operation)) has_waited[instruction.step] = true;
    slots.push_back(instruction.step + (has_waited[instruction.step] ? 1 : 0));
  }
  return slots;
}

class InSegments {
 public:
  InSegments(const Plan& plan, Rank rank, int64_t num_segments)
      : plan_(plan), rank_(rank), num_segments_(num_segments), segment_(compile(plan_of_segment(plan), rank)) {}

  Program write() {
    all_.dtype = segment_.dtype;
    all_.groups = segment_.groups;
    all_.step_texts = segment_.step_texts;
    const std::vector<int64_t> held = plan_.src.local_shape_of_rank(rank_);
    const std::vector<int64_t> needed = plan_.dst.local_shape_of_rank(rank_);
    all_.buffers.push_back({count_of(held), plan_.src.dtype(), BufferRole::kInput, held});
    all_.buffers.push_back({count_of(needed), plan_.src.dtype(), BufferRole::kOutput});
    all_.outputs.push_back({kOutputBuffer, needed});
    make_buffers();
    tickets_.resize(num_segments_, std::vector<Ticket>(segment_.instructions.size(), kNoTicket));
    const auto num_steps = static_cast<int>(plan_.steps.size());
    const std::vector<int64_t> slots = slots_of(segment_);
    for (int64_t slot = 0; slot < num_segments_ + num_steps; ++slot) {
      for (int64_t segment = std::max<int64_t>(slot - num_steps, 0); segment <= std::min(slot, num_segments_ - 1);
           ++segment) {
        if (slot == segment) copy(plan_.src, kInputBuffer, buffers_[segment][kInputBuffer], segment, 0);
        for (size_t i = 0; i < slots.size(); ++i) {
          if (segment + slots[i] == slot) emit(segment, i);
        }
        if (slot == segment + num_steps) {
          copy(plan_.dst, kOutputBuffer, buffers_[segment][segment_.outputs[0].buffer], segment, num_steps - 1);
        }
      }
    }
    return std::move(all_);
  }

 private:
  static constexpr BufferId kOutputBuffer{1};

  static int64_t count_of(const std::vector<int64_t>& shape) {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  }

  void make_buffers() {
    for (int64_t segment = 0; segment < num_segments_; ++segment) {
      std::vector<BufferId>& numbers = buffers_.emplace_back();
      for (const Buffer& buffer : segment_.buffers) {
        numbers.push_back(static_cast<BufferId>(all_.buffers.size()));
        all_.buffers.push_back({buffer.count, buffer.dtype});
      }
    }
  }

  // Copies a segment of the input, or to the result.
  void copy(const Layout& layout, BufferId whole, BufferId of_segment, int64_t segment, int step) {
    if (!layout.mesh().position_of(rank_)) return;
    const SegmentOfPart part(layout.local_shape_of_rank(rank_), plan_.segments,
                             cell_length(plan_, plan_.segments.tensor_dim));
    const bool is_input = whole == kInputBuffer;
    std::vector<Box> boxes = is_input ? part.from_part(segment) : part.to_part(segment);
    if (boxes.empty()) return;
    Copy copy{is_input ? whole : of_segment, is_input ? of_segment : whole, std::move(boxes)};
    all_.instructions.push_back({std::move(copy), step});
  }

  void emit(int64_t segment, size_t index) {
    Instruction instruction = segment_.instructions[index];
    if (auto* wait = std::get_if<Wait>(&instruction.operation)) {
      wait->ticket = tickets_[segment][wait->ticket];
    } else {
      std::visit(Renumbered(buffers_[segment]), instruction.operation);
    }
    tickets_[segment][index] = static_cast<Ticket>(all_.instructions.size());
    all_.instructions.push_back(std::move(instruction));
  }

  const Plan& plan_;
  Rank rank_;
  int64_t num_segments_;
  Program segment_;
  Program all_;
  std::vector<std::vector<BufferId>> buffers_;  // by segment, and by the buffer's number in the segment's program
  std::vector<std::vector<Ticket>> tickets_;    // the same of instructions
};

}  // namespace

Program compile_in_segments(const Plan& plan, Rank rank, int64_t num_segments) {
  return InSegments(plan, rank, num_segments).write();
}

int64_t worst_peak_bytes_in_segments(const Plan& plan, const std::vector<Rank>& ranks) {
  const int64_t under_way = std::min(plan.segments.count, static_cast<int64_t>(plan.steps.size()) + 2);
  int64_t worst = 0;
  for (const Rank rank : ranks) worst = std::max(worst, compile_in_segments(plan, rank, under_way).peak_bytes());
  return worst;
}

}  // namespace shardwright
