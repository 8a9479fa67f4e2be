// A rank's compiled program, unbound (CompiledProgram) and bound to groups of ranks (Executable). Both are immutable,
// so any thread may use them.
//
// A program's *own dtype* is that of the tensor that is moved (Program::dtype). Single buffers may have other dtypes.
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

// A plan step that communicates, as Executable::communications reports it, independent of the messages that implement
// it.
struct Communication {
  std::string op;              // the kind of step, from step_op_name
  std::string reduce_op;       // for reductions; else empty
  std::vector<int> mesh_dims;  // the mesh dims in which the communicating ranks differ
  int64_t group_size = 0;      // number of ranks that communicate with each other
  // For an all_to_all between two cuts: the tensor dims that are cut before and after.
  int64_t gather_dim = 0;
  int64_t shard_dim = 0;
};

// (name, value) of each property of a program that must be equal on all ranks that run it.
using Signature = std::vector<std::pair<std::string, std::string>>;

// The plan or the arguments that a program was compiled from. Used only for errors, profiles and comparisons of ranks.
class Origin {
 public:
  virtual ~Origin() = default;
  virtual const char* kind() const = 0;         // "redistribute", "matmul", "attention" or "batch"
  virtual std::vector<Plan> plans() const = 0;  // empty for attention and batches
  // The title in profilers, and the participating ranks; by default those of the first plan.
  virtual std::string title() const;
  virtual std::vector<Rank> ranks() const;
  // The description in error messages.
  virtual std::string text() const = 0;
  // The properties that must be equal on all ranks.
  virtual Signature signature() const = 0;
};

// The program of one rank, with all properties of its instructions that a run needs.
class CompiledProgram {
 public:
  // Compiles a plan from its bytes. Throws UserError if they are not a plan, or if the rank is not on the mesh.
  static std::shared_ptr<const CompiledProgram> from_plan_bytes(const std::string& plan_bytes, Rank rank);

  // `plans` are the plans of `origin`.
  CompiledProgram(Program program, const std::vector<const Plan*>& plans, std::unique_ptr<Origin> origin, Rank rank);

  // A program that is not made of plans. Its received bytes are counted from its transfers. `is_collective`: true if
  // any rank communicates.
  CompiledProgram(Program program, Lowering lowering, bool is_collective, std::unique_ptr<Origin> origin, Rank rank);

  const Program& program() const { return program_; }
  // The buffers that are allocated and freed at each instruction.
  const Program::Lifetimes& lifetimes() const { return lifetimes_; }
  const Origin& origin() const { return *origin_; }
  Rank rank() const { return rank_; }
  // The capabilities of the transport that the program was compiled for.
  const Lowering& lowering() const { return lowering_; }

  // True if the result is the input itself, so that nothing has to run.
  bool returns_input() const { return program_.is_input(program_.outputs[0].buffer); }
  // True if this rank communicates.
  bool communicates() const { return last_communication_ >= 0; }
  // True if any rank communicates.
  bool is_collective() const { return is_collective_; }
  // Bytes that this rank receives from other ranks in a run.
  int64_t received_bytes() const { return received_bytes_; }
  // True if the tensor is sent as bytes, because process groups do not support its dtype.
  bool is_sent_as_bytes() const { return is_sent_as_bytes_; }

  // Returns the prepared copy of a Copy instruction; null if the copy casts, or is between host and device.
  const StridedCopy* copy(int instruction) const {
    const std::optional<StridedCopy>& prepared = copies_[instruction];
    return prepared ? &*prepared : nullptr;
  }
  // Returns the index of the compute instruction or Wait that a transfer must run after (order_of_transfers); negative
  // if there is none.
  int order_of(int transfer) const { return order_of_transfers_[transfer]; }
  // True if some transfer must run after this compute instruction or Wait.
  bool orders_a_transfer(int instruction) const { return orders_a_transfer_[instruction]; }

  // The index of the product that waits for flags (Gemm::flags), and the buffer of its result; -1 and kMissingBuffer
  // without such a product.
  int flagged_product() const { return flagged_product_; }
  BufferId flagged_result() const { return flagged_result_; }

  // The index of the last transfer; -1 if there is none.
  int last_communication() const { return last_communication_; }
  // The index of the first Wait; the number of instructions if there is none.
  int first_wait() const { return first_wait_; }
  // One past the last transfer before the first Wait.
  int end_of_first_transfers() const { return end_of_first_transfers_; }
  // One past the last instruction that reads an input, not counting transfers that read it before the first Wait.
  int end_of_input_reads() const { return end_of_input_reads_; }
  // One past the last native collective, whose order relative to other collectives on the group matters.
  int end_of_collectives() const { return end_of_collectives_; }
  // True if a transfer, or an instruction after the first Wait, reads an input.
  bool reads_input_after_start() const { return reads_input_after_start_; }

  // Returns the offset of this rank's input in its output, in elements, if the plan is one step that only moves a 1-D
  // tensor and the input stays one contiguous range. Such a plan may run in place: the output's memory may already hold
  // the input at that offset.
  std::optional<int64_t> offset_of_input() const { return offset_of_input_; }

  // Throws c10::ValueError for the first input or destination with a wrong shape, dtype or device. Tensors for buffers
  // of the program's own dtype may have any dtype of the same size, but all must have the same dtype.
  void check_tensors(c10::ArrayRef<at::Tensor> tensors) const;
  // Returns the options for buffers of the program's own dtype, in a run with these tensors.
  at::TensorOptions options_like(c10::ArrayRef<at::Tensor> tensors) const;
  // Returns the options of a buffer. `like`: the result of options_like.
  at::TensorOptions options_of(int buffer, const at::TensorOptions& like) const {
    return dtypes_[buffer] == at::ScalarType::Undefined ? like : like.dtype(dtypes_[buffer]);
  }

 private:
  void note_order();         // fills order_of_transfers_ and orders_a_transfer_
  void note_dtypes();        // fills dtypes_, dtype_input_ and is_sent_as_bytes_
  void note_instructions();  // fills copies_ and all indices of instructions

  Program program_;
  Program::Lifetimes lifetimes_;
  std::unique_ptr<Origin> origin_;
  Rank rank_;
  Lowering lowering_;
  std::vector<int> order_of_transfers_;             // by instruction; empty if the host carries out transfers
  std::vector<bool> orders_a_transfer_;             // by instruction: see orders_a_transfer
  std::vector<std::optional<StridedCopy>> copies_;  // by instruction: see copy
  std::vector<at::ScalarType> dtypes_;              // by buffer; Undefined for the program's own dtype
  int dtype_input_ = -1;  // the first input of the program's own dtype, which sets the dtype of a run; -1: none
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
  bool is_sent_as_bytes_ = false;  // see is_sent_as_bytes
};

// A program bound to groups of ranks. Its runs keep it alive (std::shared_ptr). It does not keep the groups alive.
class Executable {
 public:
  // `groups`: one group per entry of program().groups, with the same ranks in the same order. Throws UserError
  // otherwise.
  Executable(std::shared_ptr<const CompiledProgram> compiled, std::vector<RankGroupPtr> groups);

  const CompiledProgram& compiled() const { return *compiled_; }
  const Program& program() const { return compiled_->program(); }

  // Returns a lease of each group, in the order of program().groups. Throws UserError if a group was destroyed.
  c10::SmallVector<GroupLease, 4> lease_groups() const;
  // The groups in the order of program().groups.
  const std::vector<RankGroupPtr>& groups() const { return groups_; }

  // Connects the groups once per device (Transport::connect). Collective among the ranks of all groups, in their order.
  // Throws c10::Error, on all ranks, if transfers cannot start now.
  void connect(const at::Device& device) const;
  // True if tensors on this device must be copied to the host, because Gloo cannot send them.
  bool goes_through_host(const at::Device& device) const;

  // From the program's origin: the steps that communicate, in order, equal on all ranks; and the ranks of the mesh in
  // row-major order (with two meshes: the ranks of both, ascending).
  std::vector<Communication> communications() const;
  std::vector<Rank> mesh_ranks() const;

 private:
  std::shared_ptr<const CompiledProgram> compiled_;
  std::vector<RankGroupPtr> groups_;
  mutable std::atomic<int> connected_device_{-1};  // the device on which all groups are connected
};

using ExecutablePtr = std::shared_ptr<const Executable>;

// Returns torch's dtype for a DType.
at::ScalarType scalar_type_of(DType dtype);

// Throws c10::ValueError that names `argument` if the tensor is undefined or has no strides (nested, sparse, MKL-DNN).
void check_strided(const at::Tensor& tensor, const std::string& argument);

}  // namespace shardwright
