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

// Replaces the indices of buffers and groups in an instruction of a segment's program by their indices in the full
// program.
class Renumber {
 public:
  Renumber(const std::vector<BufferId>& buffers, const std::vector<int>& groups) : buffers_(buffers), groups_(groups) {}

  void operator()(Copy& o) const { replace(o.src, o.dst); }
  void operator()(FillZero& o) const { replace(o.dst.buffer); }
  void operator()(Divide& o) const { replace(o.dst.buffer); }
  void operator()(Power& o) const { replace(o.src.buffer, o.dst.buffer); }
  void operator()(Reduce& o) const {
    for (BufferRange& part : o.parts) replace(part.buffer);
    replace(o.dst.buffer);
  }
  void operator()(Cast& o) const { replace(o.src.buffer, o.dst.buffer); }
  template <IsOneOf<Gemm, Attend, AttendBackward, Merge, Accumulate, Offer, Fetch> Product>
  void operator()(Product&) const {
    throw InvariantError("the program of a plan has an instruction that only products and attention have");
  }
  void operator()(AllGather& o) const {
    replace(o.src.buffer, o.dst.buffer);
    o.group = groups_[o.group];
  }
  void operator()(ReduceScatter& o) const {
    replace(o.src.buffer, o.dst.buffer);
    o.group = groups_[o.group];
  }
  void operator()(AllReduce& o) const {
    replace(o.data.buffer);
    o.group = groups_[o.group];
  }
  void operator()(AllToAll& o) const {
    replace(o.src.buffer, o.dst.buffer);
    o.group = groups_[o.group];
  }
  void operator()(SendReceive& o) const {
    for (auto* messages : {&o.sends, &o.receives}) {
      for (SendReceive::Message& message : *messages) replace(message.range.buffer);
    }
    o.group = groups_[o.group];
  }
  void operator()(Wait&) const {}

 private:
  // Replaces buffers; kMissingBuffer stays.
  template <typename... Ids>
  void replace(Ids&... ids) const {
    ((ids = ids < 0 ? ids : buffers_[ids]), ...);
  }

  // Indices in the full program, by index in the segment's program.
  const std::vector<BufferId>& buffers_;
  const std::vector<int>& groups_;
};

// The boxes that copy a uniform segment out of a rank's part or back. Along the segments' tensor dim, a part consists
// of blocks of equal length (block_length in moves/segments.h), and a segment is the same range of each block: with
// blocks of 4 rows and 2 segments, segment 1 of a part of 8 rows has rows 2, 3, 6 and 7.
class SegmentOfPart {
 public:
  // `shape` is the shape of the part, `block` the length of a block.
  SegmentOfPart(const std::vector<int64_t>& shape, const Segments& segments, int64_t block)
      : length_(block / segments.count), blocks_(shape[segments.tensor_dim] / block) {
    for (int t = 0; t < static_cast<int>(shape.size()); ++t) {
      if (t < segments.tensor_dim) before_ *= shape[t];
      if (t > segments.tensor_dim) after_ *= shape[t];
    }
    block_ = block;
  }

  // Return the boxes that copy a segment from the part to the segment's own tensor, and back; none for an empty part.
  std::vector<Box> from_part(int64_t segment) const {
    if (before_ * blocks_ * after_ == 0) return {};
    Box box{segment * length_ * after_,
            0,
            {before_, blocks_, length_ * after_},
            {blocks_ * block_ * after_, block_ * after_, 1},
            {blocks_ * length_ * after_, length_ * after_, 1}};
    box.simplify();
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
  int64_t length_;      // indices of a segment in each block
  int64_t blocks_;      // number of blocks in the part
  int64_t block_ = 1;   // length of a block
  int64_t before_ = 1;  // product of the dims before the tensor dim
  int64_t after_ = 1;   // product of the dims after it
};

// Returns the pipeline stage of each instruction of a segment's program, counted from the segment's first stage.
std::vector<int64_t> stages_of(const Program& segment) {
  std::vector<int64_t> stages;
  std::vector<bool> has_waited(segment.step_texts.size());
  for (const Instruction& instruction : segment.instructions) {
    if (std::holds_alternative<Wait>(instruction.operation)) has_waited[instruction.step] = true;
    stages.push_back(instruction.step + (has_waited[instruction.step] ? 1 : 0));
  }
  return stages;
}

// Writes the program of a plan in segments from the programs of its segments.
class InSegments {
 public:
  InSegments(const Plan& plan, Rank rank)
      : plan_(plan), rank_(rank), num_segments_(plan.segments.count), plans_(plans_of_segments(plan)) {
    for (const Plan& segment : plans_) {
      SegmentProgram& segment_program = segments_.emplace_back(SegmentProgram{compile(segment, rank), {}, {}});
      segment_program.stages = stages_of(segment_program.program);
    }
  }

  // Returns the full program. Must be called once.
  Program write() {
    all_.dtype = of(0).program.dtype;
    all_.step_texts = of(0).program.step_texts;
    const std::vector<int64_t> held = plan_.src.local_shape_of_rank(rank_);
    const std::vector<int64_t> needed = plan_.dst.local_shape_of_rank(rank_);
    all_.buffers.push_back({count_of(held), plan_.src.dtype(), BufferRole::kInput, held});
    all_.buffers.push_back({count_of(needed), plan_.src.dtype(), BufferRole::kOutput});
    all_.outputs.push_back({kOutputBuffer, needed});
    for (SegmentProgram& segment_program : segments_) add_groups(segment_program);
    make_buffers();
    const auto num_steps = static_cast<int>(plan_.steps.size());
    for_each_stage(num_segments_, num_steps, [&](int64_t segment, int64_t stage) {
      const SegmentProgram& segment_program = of(segment);
      if (stage == 0) copy(plan_.src, kInputBuffer, buffers_[segment][kInputBuffer], segment, 0);
      for (size_t i = 0; i < segment_program.stages.size(); ++i) {
        if (segment_program.stages[i] == stage) emit(segment, i);
      }
      if (stage == num_steps) {
        copy(plan_.dst, kOutputBuffer, buffers_[segment][segment_program.program.outputs[0].buffer], segment,
             num_steps - 1);
      }
    });
    return std::move(all_);
  }

 private:
  static constexpr BufferId kOutputBuffer{1};  // the full result; kInputBuffer is the full input

  // The program of one segment, or of all segments if they are uniform.
  struct SegmentProgram {
    Program program;
    std::vector<int64_t> stages;
    std::vector<int> groups;  // by group of the segment's program: its index in the full program
  };

  // Returns the program of a segment.
  const SegmentProgram& of(int64_t segment) const { return segments_[are_uniform() ? 0 : segment]; }
  bool are_uniform() const { return plans_.size() == 1; }

  // Returns the number of elements of a shape.
  static int64_t count_of(const std::vector<int64_t>& shape) {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  }

  // Adds the groups of a segment's program that the full program lacks, and sets `groups`.
  void add_groups(SegmentProgram& segment_program) {
    for (const Group& group : segment_program.program.groups) {
      const auto is_same = [&](const Group& known) { return known.ranks == group.ranks; };
      const auto found = std::find_if(all_.groups.begin(), all_.groups.end(), is_same);
      segment_program.groups.push_back(static_cast<int>(found - all_.groups.begin()));
      if (found == all_.groups.end()) all_.groups.push_back(group);
    }
  }

  // Adds the buffers of every segment. The input and result of a segment become temporaries.
  void make_buffers() {
    for (int64_t segment = 0; segment < num_segments_; ++segment) {
      std::vector<BufferId>& numbers = buffers_.emplace_back();
      for (const Buffer& buffer : of(segment).program.buffers) {
        numbers.push_back(static_cast<BufferId>(all_.buffers.size()));
        all_.buffers.push_back({buffer.count, buffer.dtype});
      }
      tickets_.emplace_back(of(segment).program.instructions.size(), kNoTicket);
    }
  }

  // Returns the boxes that copy the rank's part of the source to the segment (`is_input`), or the segment to the rank's
  // part of the result. `layout` is the full source or the full result. The rank must be on its mesh.
  std::vector<Box> boxes_of(const Layout& layout, int64_t segment, bool is_input) const {
    if (are_uniform()) {
      const SegmentOfPart part(layout.local_shape_of_rank(rank_), plan_.segments,
                               block_length(plan_, plan_.segments.tensor_dim));
      return is_input ? part.from_part(segment) : part.to_part(segment);
    }
    const Layout& segment_layout = is_input ? plans_[segment].src : plans_[segment].dst;
    const Position position = *layout.mesh().position_of(rank_);
    const Region of_all = layout.region(position);
    const Region of_segment = segment_layout.region(position);
    return is_input ? Selection(of_all, of_segment).boxes(CopySide::local(), CopySide::local())
                    : Selection(of_segment, of_all).boxes(CopySide::local(), CopySide::local());
  }

  // Emits the copy of a segment from the input if `full_buffer` is the input, otherwise to the result. Emits nothing if
  // the rank is not on the mesh of `layout`. `step` is the step to which the copy is attributed.
  void copy(const Layout& layout, BufferId full_buffer, BufferId segment_buffer, int64_t segment, int step) {
    if (!layout.mesh().position_of(rank_)) return;
    const bool is_input = full_buffer == kInputBuffer;
    std::vector<Box> boxes = boxes_of(layout, segment, is_input);
    if (boxes.empty()) return;
    Copy copy{is_input ? full_buffer : segment_buffer, is_input ? segment_buffer : full_buffer, std::move(boxes)};
    all_.instructions.push_back({std::move(copy), step});
  }

  // Emits an instruction of a segment's program, with the numbers of the full program.
  void emit(int64_t segment, size_t index) {
    Instruction instruction = of(segment).program.instructions[index];
    if (auto* wait = std::get_if<Wait>(&instruction.operation)) {
      wait->ticket = tickets_[segment][wait->ticket];
    } else {
      std::visit(Renumber(buffers_[segment], of(segment).groups), instruction.operation);
    }
    tickets_[segment][index] = static_cast<Ticket>(all_.instructions.size());
    all_.instructions.push_back(std::move(instruction));
  }

  const Plan& plan_;
  Rank rank_;
  int64_t num_segments_;
  std::vector<Plan> plans_;               // one per segment, or one for all if they are uniform
  std::vector<SegmentProgram> segments_;  // one for each of plans_
  Program all_;
  std::vector<std::vector<BufferId>> buffers_;  // by segment, then by buffer of the segment's program
  std::vector<std::vector<Ticket>> tickets_;    // by segment, then by instruction of its program
};

}  // namespace

Program compile_in_segments(const Plan& plan, Rank rank) { return InSegments(plan, rank).write(); }

}  // namespace shardwright
