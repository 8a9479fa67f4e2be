// What compilers write programs with, and the parts of them that all compilers share.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "program/boxes.h"
#include "program/program.h"

namespace shardwright {

// The program of one rank, as far as it is written. Each step says by its layouts on which mesh it takes place, and
// where the rank is on that mesh, if it is part of it at all.
class ProgramBuilder {
 public:
  // With named_groups_only, all ranks of a step's group take part in it; else those that have something to say.
  ProgramBuilder(DType dtype, Lowering lowering, bool named_groups_only, Rank rank);

  Lowering lowering() const { return lowering_; }
  bool named_groups_only() const { return named_groups_only_; }
  Rank rank() const { return rank_; }
  bool is_on(const Mesh& mesh) const { return mesh.position_of(rank_).has_value(); }
  Position position_on(const Mesh& mesh) const;  // which it must be on
  Region region_in(const Layout& layout) const { return layout.region(position_on(layout.mesh())); }
  int64_t count_in(const Layout& layout) const;  // elements; none where the rank is not on the mesh
  Program& program() { return program_; }
  const Program& program() const { return program_; }

  // What follows is named by `text` in messages.
  void begin_step(std::string text);
  // Buffers that follow are of this dtype, unless another one is named. Answers the one before.
  DType begin_dtype(DType dtype) { return std::exchange(dtype_, dtype); }
  // All-to-alls that follow carry this step, in so many of them: by messages where these are large.
  void begin_exchanges(const Step& step, int64_t shares = 1);
  // What follows belongs to this chunk of a pipeline; -1: to none.
  void begin_chunk(int chunk) { chunk_ = chunk; }

  // Of the dtype that was begun; at first the program's.
  BufferId new_buffer(int64_t count) { return new_buffer(count, dtype_); }
  BufferId new_buffer(int64_t count, DType dtype);
  // The next input; all of them before any other buffer.
  BufferId new_input(std::vector<int64_t> shape) { return new_input(std::move(shape), dtype_); }
  BufferId new_input(std::vector<int64_t> shape, DType dtype);
  // The next result; it may be an input.
  void add_output(BufferId buffer, std::vector<int64_t> shape);
  int64_t count_of(BufferId buffer) const { return program_.buffers[buffer].count; }
  BufferRange whole(BufferId buffer) const { return {buffer, 0, count_of(buffer)}; }

  // Its ticket, where it is a transfer.
  Ticket emit(Operation operation);
  // The last instruction, if it is of the step and chunk that are being written.
  Instruction* last_of_chunk();
  // These emit nothing where nothing is to be done: send_receive answers kNoTicket, which wait takes.
  Ticket send_receive(SendReceive move);
  void wait(Ticket ticket);
  void copy(BufferId src, BufferId dst, std::vector<Box> boxes);
  void divide(BufferRange dst, double divisor);
  // What the rank holds both before and after a step.
  void copy_shared(const Step& step, BufferId current, BufferId next);

  // Takes back what was emitted last, from the last Wait that is not before `first`, as long as nothing communicates
  // behind it: to be given to `put_back` after something that need not wait.
  std::vector<Instruction> take_last_wait(int first);
  void put_back(std::vector<Instruction> instructions);

  // Indices into the program's groups: of the one that a step makes of the ranks around this one, and of some ranks
  // of it by ascending rank.
  int group_index(const Step& step);
  int group_of_ranks(MeshDimSet mesh_dims, std::vector<Rank> ranks);

 private:
  Lowering lowering_;
  bool named_groups_only_;
  Rank rank_;
  DType dtype_;
  int chunk_ = -1;
  bool exchanges_by_messages_ = false;
  Program program_;
};

void append(std::vector<Box>& boxes, std::vector<Box> more);

// How a pending reduction is carried out: pre-power, one collective with `op`, division, post-power.
struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  double divisor = 1;
  double power = 1;
  const Mesh* mesh = nullptr;  // contributions are added in the order of the positions on it
};

Reduction reduction_of(const Step& step);

// Ranges by index in a group, in the order of ascending positions: replicas then add in the same order on meshes whose
// ranks are shuffled too.
std::vector<BufferRange> by_position(const Mesh& mesh, const std::vector<Rank>& group,
                                     const std::vector<BufferRange>& by_index);

// The rows of a staging buffer, one per rank of the group, in the order in which a reduction adds them.
std::vector<BufferRange> rows_of(const ProgramBuilder& builder, const Reduction& reduction, BufferId staging,
                                 int64_t row, int group);

// result = the reduction of the parts, with what comes behind the op.
void reduce_parts(ProgramBuilder& builder, const Reduction& reduction, std::vector<BufferRange> parts,
                  BufferRange result);

// The same after a native collective, which neither divides nor takes roots.
void finish_native(ProgramBuilder& builder, const Reduction& reduction, BufferRange result);

// A move that other work may be put in between: each stage but the last ends with transfers under way, each but the
// first begins with waiting for them.
using Stages = std::vector<std::function<void()>>;

// result = the sum over the group of `contribution`, by messages and sums here; on all ranks of the group.
Stages composed_all_reduce(ProgramBuilder& builder, int group, const Reduction& reduction, BufferRange contribution,
                           BufferRange result);
// In place, by the backend's own collective.
Stages native_all_reduce(ProgramBuilder& builder, int group, const Reduction& reduction, BufferRange data);

// One move, from the buffer that holds `before` to the one that will hold `after`.
void compile_step(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next);

// How messages name a step of a plan.
std::string step_text(const Plan& plan, size_t index);

// The steps [begin, end) of a plan, from the buffer that holds what is there before; the one that holds what is there
// after. Messages have `of_what` in front of the name of a step.
BufferId compile_steps(ProgramBuilder& builder, const Plan& plan, size_t begin, size_t end, BufferId current,
                       const std::string& of_what = "");

void compile_data_move(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next);
void compile_reduce_scatter(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next);
void compile_all_reduce(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next);

}  // namespace shardwright
