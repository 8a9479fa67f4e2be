// A rank's compiled program (CompiledProgram), and the same program bound to groups of ranks (Executable). Both are
// immutable, so any thread may use them.
//
// A program's *own dtype* is the dtype of the tensor that is moved (Program::dtype). Some buffers have other dtypes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "moves/plan.h"
#include "program/program.h"
#include "program/strided_copy.h"
#include "runtime/transport.h"

namespace shardwright {

// The description of a plan step that communicates. It is the same on all ranks, whatever messages carry out the step.
struct Communication {
  std::string op;              // kind of the step (step_op_name): "all_gather", "all_to_all", ...
  std::string reduce_op;       // "sum", "max", ... if the step reduces; else empty
  std::vector<int> mesh_dims;  // the mesh dims in which the communicating ranks differ
  int64_t group_size = 0;      // number of ranks that communicate with each other
  // The tensor dims that are sharded over mesh_dims before the step (gather_dim) and after it (shard_dim); 0: none.
  int64_t gather_dim = 0;
  int64_t shard_dim = 0;
};

// The properties of a program that must be equal on all ranks that run it, as (name, value) pairs.
using Signature = std::vector<std::pair<std::string, std::string>>;

// The object that a program was compiled from, such as a plan. Used only for errors, profiles and comparisons of ranks.
// An origin without plans must override `title` and `ranks`.
class Origin {
 public:
  virtual ~Origin() = default;
  virtual const char* kind() const = 0;         // "redistribute", "matmul", "attention" or "batch"
  virtual std::vector<Plan> plans() const = 0;  // empty for attention and batches
  // Returns the title in profilers; by default the kind and the placements of the first plan.
  virtual std::string title() const;
  // Returns the ranks that take part; by default those of the first plan.
  virtual std::vector<Rank> ranks() const;
  // Returns the description in error messages.
  virtual std::string text() const = 0;
  virtual Signature signature() const = 0;
};

// The program of one rank, and properties of its instructions that are computed once, for all runs.
class CompiledProgram {
 public:
  // Compiles a plan from its bytes. Throws UserError if they are not a plan, or if the rank is not on the mesh.
  static std::shared_ptr<const CompiledProgram> from_plan_bytes(const std::string& plan_bytes, Rank rank);

  // Takes a program that was compiled from `plans`, the plans of `origin`. There is at least one; the first one has the
  // lowering.
  CompiledProgram(Program program, const std::vector<const Plan*>& plans, std::unique_ptr<Origin> origin, Rank rank);

  // Takes a program that was not compiled from plans. Its received bytes are counted from its transfers.
  // `is_collective`: true if any rank communicates.
  CompiledProgram(Program program, Lowering lowering, bool is_collective, std::unique_ptr<Origin> origin, Rank rank);

  const Program& program() const { return program_; }
  // The buffers that are allocated and freed at each instruction.
  const Program::Lifetimes& lifetimes() const { return lifetimes_; }
  const Origin& origin() const { return *origin_; }
  Rank rank() const { return rank_; }
  // The capabilities of the transport that the program was compiled for.
  const Lowering& lowering() const { return lowering_; }

  // True if the result is the input itself, so that nothing has to run. The program must have an output.
  bool returns_input() const { return program_.is_input(program_.outputs[0].buffer); }
  // True if this rank communicates.
  bool communicates() const { return last_communication_ >= 0; }
  // True if any rank communicates.
  bool is_collective() const { return is_collective_; }
  // Bytes that this rank receives from other ranks in a run.
  int64_t received_bytes() const { return received_bytes_; }
  // True if the program divides integers, on any rank. As with PyTorch's division, its output is then a new
  // floating-point tensor, which exists only at the end of a run.
  bool divides_integers() const { return divides_integers_; }
  // True if the tensor is sent as bytes, because process groups do not support its dtype.
  bool is_sent_as_bytes() const { return is_sent_as_bytes_; }

  // Returns the precomputed StridedCopy of a Copy instruction; null if the copy casts, or is between host and device,
  // and for other instructions.
  const StridedCopy* strided_copy(int instruction) const {
    const std::optional<StridedCopy>& prepared = copies_[instruction];
    return prepared ? &*prepared : nullptr;
  }
  // Returns the index of the last compute instruction or Wait after which a transfer must run (order_of_transfers in
  // program/order.h); negative if there is none. Only if lowering().is_on_device.
  int predecessor_of(int transfer) const { return predecessors_[transfer]; }
  // True if this instruction is the predecessor of a transfer; always false unless lowering().is_on_device.
  bool is_predecessor(int instruction) const { return is_predecessor_[instruction]; }

  // The index of the product that waits for flags (Gemm::flags); -1 if there is none. flagged_result is the buffer of
  // its result; kMissingBuffer if there is no such product.
  int flagged_product() const { return flagged_product_; }
  BufferId flagged_result() const { return flagged_result_; }

  // The index of the last transfer; -1 if there is none.
  int last_communication() const { return last_communication_; }
  // The index of the first Wait; the number of instructions if there is none.
  int first_wait() const { return first_wait_; }
  // One past the index of the last transfer that is before the first Wait; 0 if there is no such transfer. In a program
  // without a Wait, one past the index of its last transfer.
  int end_of_first_transfers() const { return end_of_first_transfers_; }
  // One past the index of the last instruction that reads an input, not counting transfers before the first Wait; 0 if
  // there is no such instruction.
  int end_of_input_reads() const { return end_of_input_reads_; }
  // One past the index of the last native collective (a transfer that is not an exchange); 0 if there is none. Process
  // groups match native collectives by their order, so all ranks must start them in the same order relative to other
  // code's collectives.
  int end_of_collectives() const { return end_of_collectives_; }
  // True if a transfer, or an instruction after the first Wait, reads an input.
  bool reads_input_after_start() const { return reads_input_after_start_; }

  // Returns the offset of this rank's input in its output, in elements, if the plan is one step that moves a 1-D tensor
  // without reductions and the input is one contiguous range of the output; else nothing. Such a plan may run in place:
  // the input may be a view of the output at that offset. For example, in an all-gather of 8 elements over 4 ranks,
  // rank 2 has elements 4 and 5, so the offset is 4.
  std::optional<int64_t> offset_of_input() const { return offset_of_input_; }

  // Throws c10::ValueError for a wrong number of tensors, and for the first tensor that is a subclass or not strided,
  // or has a wrong shape, dtype or device. `tensors` are the inputs, then the destinations. The tensors for buffers of
  // the program's own dtype may have any dtype of the same size, but all of them must have the same dtype.
  void check_tensors(c10::ArrayRef<at::Tensor> tensors) const;
  // Returns the options of the buffers of the program's own dtype in a run on these tensors; without tensors, those of
  // CPU tensors.
  at::TensorOptions own_options(c10::ArrayRef<at::Tensor> tensors) const;
  // Returns the options of a buffer. `own`: the result of own_options.
  at::TensorOptions options_of(int buffer, const at::TensorOptions& own) const {
    return dtypes_[buffer] == at::ScalarType::Undefined ? own : own.dtype(dtypes_[buffer]);
  }

 private:
  void set_predecessors();  // sets predecessors_ and is_predecessor_
  void set_dtypes();        // sets dtypes_, dtype_input_ and is_sent_as_bytes_
  void set_indices();       // sets copies_, all indices of instructions and reads_input_after_start_

  Program program_;
  Program::Lifetimes lifetimes_;
  std::unique_ptr<Origin> origin_;
  Rank rank_;
  Lowering lowering_;
  std::vector<int> predecessors_;                   // by instruction; empty if the host carries out transfers
  std::vector<bool> is_predecessor_;                // by instruction
  std::vector<std::optional<StridedCopy>> copies_;  // by instruction; see strided_copy
  std::vector<at::ScalarType> dtypes_;              // by buffer; Undefined for the program's own dtype
  int dtype_input_ = -1;  // index of the first input of the program's own dtype; -1 if there is none
  int64_t received_bytes_ = 0;
  std::optional<int64_t> offset_of_input_;
  int flagged_product_ = -1;
  BufferId flagged_result_ = kMissingBuffer;
  int last_communication_ = -1;
  int first_wait_ = 0;
  int end_of_first_transfers_ = 0;
  int end_of_input_reads_ = 0;
  int end_of_collectives_ = 0;
  bool reads_input_after_start_ = false;
  bool is_collective_ = false;
  bool divides_integers_ = false;
  bool is_sent_as_bytes_ = false;
};

// A program bound to groups of ranks. An Execution keeps its Executable alive; an Executable does not keep its groups
// alive.
class Executable {
 public:
  // `groups`: one group per entry of program().groups, with the same ranks in the same order. Throws UserError if the
  // number of groups, the size of a group or this rank's index in it is wrong; the other ranks of a group are not
  // compared.
  Executable(std::shared_ptr<const CompiledProgram> compiled, std::vector<RankGroupPtr> groups);

  const CompiledProgram& compiled() const { return *compiled_; }
  const Program& program() const { return compiled_->program(); }

  // Returns a lease of each group, in the order of program().groups. Throws UserError if a group was destroyed.
  c10::SmallVector<GroupLease, 4> lease_groups() const;
  // The groups in the order of program().groups.
  const std::vector<RankGroupPtr>& groups() const { return groups_; }

  // Connects the groups, in their order, at the first call for a device (Transport::connect). Does nothing on CPU and
  // for Gloo. All ranks of the groups must call it. Throws UserError if a group was destroyed, and c10::Error if
  // transfers cannot start now: in an open NCCL group, or in a capture on groups that are not connected.
  void connect(const at::Device& device) const;
  // True if a run on this device must copy its tensors to host memory, because the groups (Gloo) transfer CPU tensors
  // only and the program does not stage them itself.
  bool goes_through_host(const at::Device& device) const;

  // Returns the steps that communicate, in order; equal on all ranks. Empty for attention and batches, which have no
  // plans.
  std::vector<Communication> communications() const;
  // Returns the ranks of the mesh in row-major order; with two meshes, the ranks of both in ascending order.
  std::vector<Rank> mesh_ranks() const;

 private:
  std::shared_ptr<const CompiledProgram> compiled_;
  std::vector<RankGroupPtr> groups_;
  mutable std::atomic<int> connected_device_{-1};  // index of the last device for which the groups were connected
};

using ExecutablePtr = std::shared_ptr<const Executable>;

// Returns the torch dtype of a DType.
at::ScalarType scalar_type_of(DType dtype);

// Throws c10::ValueError that names `argument` unless the tensor is defined and has strides. Nested, sparse and MKL-DNN
// tensors have none.
void check_strided(const at::Tensor& tensor, const std::string& argument);

}  // namespace shardwright
