// A rank's program with what the runtime needs to know of it, alone and bound to groups of ranks. Neither ever changes,
// so both may be shared and used by any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "moves/plan.h"
#include "program/program.h"
#include "program/strided_copy.h"
#include "runtime/transport.h"

namespace shardwright {

// The meaning of a step that communicates, independent of the messages that carry it out.
struct Communication {
  std::string op;         // as step_op_name says
  std::string reduce_op;  // of reductions
  std::vector<int> mesh_dims;
  int64_t group_size = 0;
  int64_t gather_dim = 0;  // of an all_to_all between two cuts: the tensor dims that were and are cut
  int64_t shard_dim = 0;
};

// What ranks that run the same program have in common, by name.
using Signature = std::vector<std::pair<std::string, std::string>>;

// What a program was compiled from. It is asked only where something is to be reported: an error, a profile, a
// comparison of ranks.
class Origin {
 public:
  virtual ~Origin() = default;
  virtual const char* kind() const = 0;  // "redistribute" or "matmul"
  virtual std::vector<Plan> plans() const = 0;
  virtual std::string text() const = 0;
  virtual Signature signature() const = 0;
};

// The program of one rank.
class CompiledProgram {
 public:
  // From a plan's own bytes. Throws UserError if they are none, or if the rank is not on the mesh.
  static std::shared_ptr<const CompiledProgram> from_plan_bytes(const std::string& plan_bytes, Rank rank);

  // `plans`: those of `origin`.
  CompiledProgram(Program program, const std::vector<const Plan*>& plans, std::unique_ptr<Origin> origin, Rank rank);

  const Program& program() const { return program_; }
  const Program::Lifetimes& lifetimes() const { return lifetimes_; }
  const Origin& origin() const { return *origin_; }
  Rank rank() const { return rank_; }
  const Lowering& lowering() const { return lowering_; }

  bool returns_input() const { return program_.is_input(program_.outputs[0].buffer); }
  // Whether this rank communicates, and whether any rank does.
  bool communicates() const { return last_communication_ >= 0; }
  bool is_collective() const { return is_collective_; }
  int64_t received_bytes() const { return received_bytes_; }
  // Whether process groups do not support the dtype, so that it is sent as bytes.
  bool travels_as_bytes() const { return travels_as_bytes_; }

  // The prepared copy of an instruction that copies.
  const StridedCopy& copy(int instruction) const { return copies_.at(instruction); }
  // What a transfer must come after, see order_of_transfers; and whether some transfer must come after this compute
  // instruction.
  int order_of(int transfer) const { return order_of_transfers_[transfer]; }
  bool is_asked_for(int instruction) const { return is_asked_for_[instruction]; }

  // Indices of instructions; without such an instruction -1, and for the first Wait their number.
  int last_communication() const { return last_communication_; }
  int first_wait() const { return first_wait_; }
  // After the last instruction that reads an input, transfers that read it before the first Wait left out.
  int end_of_input_reads() const { return end_of_input_reads_; }
  // After the last native collective, whose place among those of others on the group counts.
  int end_of_collectives() const { return end_of_collectives_; }
  // Whether transfers read an input, or instructions after the first Wait.
  bool reads_input_after_start() const { return reads_input_after_start_; }

  // Throws c10::ValueError naming the input that does not have the shape, dtype or device that the program takes.
  void check_inputs(c10::ArrayRef<at::Tensor> inputs) const;
  // For buffers of the program's own dtype, in a run with these inputs.
  at::TensorOptions options_like(c10::ArrayRef<at::Tensor> inputs) const;
  at::TensorOptions options_of(int buffer, const at::TensorOptions& usual) const;

 private:
  void note_dtypes();
  void note_instructions();

  Program program_;
  Program::Lifetimes lifetimes_;
  std::unique_ptr<Origin> origin_;
  Rank rank_;
  Lowering lowering_;
  std::vector<int> order_of_transfers_;  // empty where the host carries transfers out
  std::vector<bool> is_asked_for_;
  std::unordered_map<int, StridedCopy> copies_;
  std::unordered_map<int, at::ScalarType> other_dtypes_;  // by buffer
  int usual_input_ = -1;                                  // the first that is of the program's own dtype
  int64_t received_bytes_ = 0;
  int last_communication_ = -1;
  int first_wait_ = 0;
  int end_of_input_reads_ = 0;
  int end_of_collectives_ = 0;
  bool reads_input_after_start_ = false;
  bool is_collective_ = false;
  bool travels_as_bytes_ = false;
};

// A program bound to groups of ranks, held by std::shared_ptr: its runs keep it alive. It does not keep the groups
// alive.
class Executable {
 public:
  // One group per entry of program().groups, with the same ranks in the same order; throws UserError on others.
  Executable(std::shared_ptr<const CompiledProgram> compiled, std::vector<RankGroupPtr> groups);

  const CompiledProgram& compiled() const { return *compiled_; }
  const Program& program() const { return compiled_->program(); }

  // Throws UserError where one of them was destroyed.
  c10::SmallVector<GroupLease, 4> lease_groups() const;
  const std::vector<RankGroupPtr>& groups() const { return groups_; }

  // See Transport::connect; does something once per device. Collective among the ranks of all groups, in their order.
  void connect(const at::Device& device) const;
  // Whether tensors there must be copied to the host, because Gloo has no messages for them.
  bool goes_through_host(const at::Device& device) const;

  // What its program's origin says: the steps that communicate, in order and the same on all ranks, and the ranks of
  // the mesh, row-major; of two meshes all, ascending.
  std::vector<Communication> communications() const;
  std::vector<Rank> mesh_ranks() const;

 private:
  std::shared_ptr<const CompiledProgram> compiled_;
  std::vector<RankGroupPtr> groups_;
  mutable std::atomic<int> connected_device_{-1};  // for which all groups are known to be connected
};

using ExecutablePtr = std::shared_ptr<const Executable>;

// Throws ValueError naming `argument` for tensors without strides: nested, sparse and MKL-DNN ones, and none at all.
void check_strided(const at::Tensor& given, const std::string& argument);

}  // namespace shardwright
