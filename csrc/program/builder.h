// ProgramBuilder, which writes the program of one rank, and functions that emit reductions and steps with it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "layout/selection.h"
#include "program/program.h"

namespace shardwright {

// Builds the program of one rank. The rank may be on none of a step's meshes.
class ProgramBuilder {
 public:
  // With named_groups_only, all ranks of a step's group take part in its transfer; otherwise only the ranks that send
  // or receive something. `dtype` is the dtype of new buffers (begin_dtype).
  ProgramBuilder(DType dtype, Lowering lowering, bool named_groups_only, Rank rank);

  Lowering lowering() const { return lowering_; }
  bool named_groups_only() const { return named_groups_only_; }
  Rank rank() const { return rank_; }
  bool is_on(const Mesh& mesh) const { return mesh.position_of(rank_).has_value(); }
  Position position_on(const Mesh& mesh) const;  // throws InvariantError if the rank is not on the mesh
  // Returns the region of the rank's part. Throws InvariantError if the rank is not on the mesh.
  Region region_in(const Layout& layout) const { return layout.region(position_on(layout.mesh())); }
  int64_t count_in(const Layout& layout) const;  // number of elements of the rank's part; 0 if it is not on the mesh
  Program& program() { return program_; }
  const Program& program() const { return program_; }

  // Starts a step, to which the following instructions belong. Error messages name its instructions by `text`;
  // profilers also show `note` (Program::step_notes).
  void begin_step(std::string text, std::string note = {});
  // Sets the dtype of buffers that are created without one. Returns the previous dtype.
  DType begin_dtype(DType dtype) { return std::exchange(dtype_, dtype); }
  // Makes the following all-to-alls part of this step: each has one of `shares` equal shares of the step's data. They
  // are sent as messages if the shares are large (all_to_alls_use_messages in transfer_method.h).
  void begin_exchanges(const Step& step, int64_t shares = 1);
  bool exchanges_by_messages() const { return exchanges_by_messages_; }
  // Starts a chunk of a pipeline, to which the following instructions belong; -1: they belong to none.
  void begin_chunk(int chunk) { chunk_ = chunk; }

  // Creates a temporary of `count` elements and returns its number. Without `dtype`, it has the dtype last given to
  // begin_dtype, or else the constructor's.
  BufferId new_buffer(int64_t count) { return new_buffer(count, dtype_); }
  BufferId new_buffer(int64_t count, DType dtype);
  // Creates the next input, row-major. All inputs must be created before any other buffer. `dtype` as for new_buffer.
  BufferId new_input(std::vector<int64_t> shape) { return new_input(std::move(shape), dtype_); }
  BufferId new_input(std::vector<int64_t> shape, DType dtype);
  // Makes a buffer the next output of the program. An input stays an input, which the caller then gets itself.
  void add_output(BufferId buffer, std::vector<int64_t> shape);
  // Returns the number of elements of a buffer.
  int64_t count_of(BufferId buffer) const { return program_.buffers[buffer].count; }
  // Returns the range of all elements of a buffer.
  BufferRange whole(BufferId buffer) const { return {buffer, 0, count_of(buffer)}; }

  // Appends an instruction and returns its index, which is the ticket of a transfer.
  Ticket emit(Operation operation);
  // Returns the last instruction if it belongs to the current step and chunk, else null.
  Instruction* last_of_chunk();
  // The following functions emit nothing if there is nothing to do. send_receive without messages returns kNoTicket,
  // wait(kNoTicket) and a copy without boxes do nothing, and so does divide for a divisor of 1, or for no elements. But
  // integers are also divided without elements, because a division changes their dtype.
  Ticket send_receive(SendReceive move);
  void wait(Ticket ticket);
  void copy(BufferId src, BufferId dst, std::vector<Box> boxes);
  void divide(BufferRange dst, double divisor);
  // Copies the elements that the rank holds both before and after a step. The rank must be on both meshes.
  void copy_shared(const Step& step, BufferId current, BufferId next);

  // Removes and returns the last Wait and all instructions after it, so that the caller can emit other instructions
  // first and then append the removed ones again with put_back. Removes nothing and returns an empty list if there is
  // no Wait at or after index `first`, or if an instruction after the last Wait starts a transfer.
  std::vector<Instruction> take_last_wait(int first);
  void put_back(std::vector<Instruction> instructions);

  // Return the index of a group in Program::groups, after adding it if it is new. group_index takes this rank's group
  // of a step on one mesh, group_of_ranks the group of the given ranks, which must ascend. Both throw InvariantError if
  // this rank is not on the mesh or among the ranks.
  int group_index(const Step& step);
  int group_of_ranks(MeshDimSet mesh_dims, std::vector<Rank> ranks);

 private:
  Lowering lowering_;
  bool named_groups_only_;
  Rank rank_;
  DType dtype_;                         // of buffers that are created without a dtype
  int chunk_ = -1;                      // chunk of the instructions that are emitted next
  bool exchanges_by_messages_ = false;  // AllToAll::by_messages of the following all-to-alls
  Program program_;
};

// Moves all boxes of `more` to the end of `boxes`.
void append(std::vector<Box>& boxes, std::vector<Box> more);

// The arithmetic of a pending reduction: each contribution is raised to `power`, the powers are reduced with `op`, and
// the result is divided by `divisor` and raised to 1 / `power`. An average is a sum with a divisor, a norm a sum with a
// power.
struct ReductionSpec {
  ReduceOp op = ReduceOp::kSum;
  double divisor = 1;
  double power = 1;
  const Mesh* mesh = nullptr;  // contributions are added in the order of its positions; must outlive the spec
};

// Returns the reduction that a step carries out. Its mesh is the step's, so the step must outlive it.
ReductionSpec reduction_of(const Step& step);

// Takes one range for each member of a group, by ascending rank, and returns the ranges by the members' ascending
// positions on the mesh. So all replicas of an element add contributions in the same order, even on meshes whose ranks
// do not ascend.
std::vector<BufferRange> by_position(const Mesh& mesh, const std::vector<Rank>& group,
                                     const std::vector<BufferRange>& by_index);

// Returns the ranges of the contributions in a staging buffer, which has `count` elements from each rank of the group
// (an index into Program::groups), by ascending rank. The returned ranges are in the order in which the reduction adds
// them (by_position).
std::vector<BufferRange> contributions_in(const ProgramBuilder& builder, const ReductionSpec& reduction,
                                          BufferId staging, int64_t count, int group);

// Emits: result = the reduction of the parts, including the division and the root. The parts are already raised to
// ReductionSpec::power.
void reduce_parts(ProgramBuilder& builder, const ReductionSpec& reduction, std::vector<BufferRange> parts,
                  BufferRange result);

// Emits the division and the root of `result` in place, after a native collective, which does neither.
void finish_native(ProgramBuilder& builder, const ReductionSpec& reduction, BufferRange result);

// An all-reduce as a list of functions, each of which emits one stage. The caller must call each once, in order, and
// may emit other work between stages. Each stage but the last ends with a transfer in flight, and the next stage begins
// by waiting for it.
using ReductionStages = std::vector<std::function<void()>>;

// Returns the stages of: result = the reduction of `contribution` over the group, on all its ranks. Ranks send each
// other contributions and reduce them locally. With more than two ranks, each rank reduces one chunk. Rank 1 of 4, with
// a contribution of 24 elements in b0 and the result in b1:
//
//   stage 0   all_to_all b0 (6, 6, 6, 6) -> b2 (6, 6, 6, 6)   receives chunk 1 of all contributions
//   stage 1   wait; reduce the 4 parts of b2 -> b1[6:12]      its chunk of the result
//             all_to_all b3 (6, 6, 6, 6) -> b1 (6, 6, 6, 6)   b3: a copy of its chunk for each rank
//   stage 2   wait
ReductionStages composed_all_reduce(ProgramBuilder& builder, int group, const ReductionSpec& reduction,
                                    BufferRange contribution, BufferRange result);
// Returns the two stages that reduce `data` in place with the transport's all-reduce.
ReductionStages native_all_reduce(ProgramBuilder& builder, int group, const ReductionSpec& reduction, BufferRange data);

// Emits one move from the buffer `current`, which holds the layout before, to the buffer `next` for the layout after.
// Emits nothing if the rank is on neither mesh.
void compile_step(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next);

// Returns the text of a plan's step for error messages: with index 0, "step 1 of 2 (all_gather over dp)".
std::string step_text(const Plan& plan, size_t index);

// Emits the steps [begin, end) of a plan, starting from the buffer `current`. Returns the buffer with the result, which
// is `current` if there are no steps. Error messages name a step by `prefix` and step_text(). With the prefix
// "scales, " the name is "scales, step 1 of 2 (all_gather over dp)".
BufferId compile_steps(ProgramBuilder& builder, const Plan& plan, size_t begin, size_t end, BufferId current,
                       const std::string& prefix = "");

// Emit a step of one kind, as compile_step does. compile_exchange emits steps that move data without reducing it.
void compile_reduce_scatter(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next);
void compile_all_reduce(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next);
void compile_exchange(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next);

}  // namespace shardwright
