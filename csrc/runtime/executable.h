// A rank's program with everything that the runtime needs to know about it, unbound (CompiledProgram) and bound to
// groups of ranks (Executable). Both are immutable, so they can be shared and used by any thread.
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

// The meaning of a step that communicates, independent of the messages that carry it out.
struct Communication {
  std::string op;         // as step_op_name says
  std::string reduce_op;  // for reductions
  std::vector<int> mesh_dims;
  int64_t group_size = 0;
  int64_t gather_dim = 0;  // for an all_to_all between two cuts: the tensor dims that are cut before and after
  int64_t shard_dim = 0;
};

// The fields that must be equal on all ranks that run the same redistribute, by name.
using Signature = std::vector<std::pair<std::string, std::string>>;

// The plans or arguments that a program was compiled from. They are only used for reports: errors, profiles,
// comparisons of ranks.
class Origin {
 public:
  virtual ~Origin() = default;
  virtual const char* kind() const = 0;  // "redistribute", "matmul" or "attention"
  virtual std::vector<Plan> plans() const = 0;
  // A title for profilers, and the ranks that take part; by default those of the first plan.
  virtual std::string title() const;
  virtual std::vector<Rank> ranks() const;
  virtual std::string text() const = 0;
  virtual Signature signature() const = 0;
};

// The program of one rank.
class CompiledProgram {
 public:
  // Compiles a plan from its bytes. Throws UserError if they are not a plan, or if the rank is not on the mesh.
  static std::shared_ptr<const CompiledProgram> from_plan_bytes(const std::string& plan_bytes, Rank rank);

  // `plans` are those of `origin`.
  CompiledProgram(Program program, const std::vector<const Plan*>& plans, std::unique_ptr<Origin> origin, Rank rank);

  // For a program that is not made of plans. Computes what it receives from its transfers. `is_collective`: whether any
  // rank communicates.
  CompiledProgram(Program program, Lowering lowering, bool is_collective, std::unique_ptr<Origin> origin, Rank rank);

  const Program& program() const { return program_; }
  const Program::Lifetimes& lifetimes() const { return lifetimes_; }
  const Origin& origin() const { return *origin_; }
  Rank rank() const { return rank_; }
  const Lowering& lowering() const { return lowering_; }

  bool returns_input() const { return program_.is_input(program_.outputs[0].buffer); }
  // Returns whether this rank communicates, and whether any rank does.
  bool communicates() const { return last_communication_ >= 0; }
  bool is_collective() const { return is_collective_; }
  int64_t received_bytes() const { return received_bytes_; }
  // Returns whether process groups do not support the dtype, so that it is sent as bytes.
  bool travels_as_bytes() const { return travels_as_bytes_; }

  // The prepared copy for a Copy instruction; null if it casts, or copies between host and device.
  const StridedCopy* copy(int instruction) const {
    const std::optional<StridedCopy>& found = copies_[instruction];
    return found ? &*found : nullptr;
  }
  // The instruction that a transfer must come after (order_of_transfers), and whether some transfer must come after
  // this compute instruction.
  int order_of(int transfer) const { return order_of_transfers_[transfer]; }
  bool is_asked_for(int instruction) const { return is_asked_for_[instruction]; }

  // The index of the product that waits for flags, and the buffer of its result; -1 and kMissingBuffer without one.
  int flagged_product() const { return flagged_product_; }
  BufferId flagged_result() const { return flagged_result_; }

  // Indices of instructions. If there is no communication, -1; if there is no Wait, the number of instructions.
  int last_communication() const { return last_communication_; }
  int first_wait() const { return first_wait_; }
  // One past the last transfer before the first Wait.
  int end_of_first_transfers() const { return end_of_first_transfers_; }
  // One past the last instruction that reads an input, not counting transfers that read it before the first Wait.
  int end_of_input_reads() const { return end_of_input_reads_; }
  // One past the last native collective, whose order relative to other collectives on the group matters.
  int end_of_collectives() const { return end_of_collectives_; }
  // Returns whether a transfer, or an instruction after the first Wait, reads an input.
  bool reads_input_after_start() const { return reads_input_after_start_; }

  // For a plan of one step that only moves a one-dimensional tensor, where all of this rank's input stays in one run of
  // its output: where that run begins, in elements. Such a plan may write to memory that holds the input there.
  std::optional<int64_t> place_of_input() const { return place_of_input_; }

  // Throws a c10::ValueError that names the first input or destination with another shape, dtype or device than the
  // program takes.
  void check_tensors(c10::ArrayRef<at::Tensor> tensors) const;
  // Options for buffers of the program's own dtype, in a run with these tensors.
  at::TensorOptions options_like(c10::ArrayRef<at::Tensor> tensors) const;
  at::TensorOptions options_of(int buffer, const at::TensorOptions& usual) const {
    return dtypes_[buffer] == at::ScalarType::Undefined ? usual : usual.dtype(dtypes_[buffer]);
  }

 private:
  void note_order();
  void note_dtypes();
  void note_instructions();

  Program program_;
  Program::Lifetimes lifetimes_;
  std::unique_ptr<Origin> origin_;
  Rank rank_;
  Lowering lowering_;
  std::vector<int> order_of_transfers_;  // empty if the host carries transfers out
  std::vector<bool> is_asked_for_;
  std::vector<std::optional<StridedCopy>> copies_;  // by instruction
  std::vector<at::ScalarType> dtypes_;              // by buffer; Undefined for the program's own dtype
  int usual_input_ = -1;                            // the first input of the program's own dtype
  int64_t received_bytes_ = 0;
  std::optional<int64_t> place_of_input_;
  int flagged_product_ = -1;
  BufferId flagged_result_ = kMissingBuffer;
  int last_communication_ = -1;
  int first_wait_ = 0;
  int end_of_first_transfers_ = 0;
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
  // Takes one group per entry of program().groups, with the same ranks in the same order; throws UserError on others.
  Executable(std::shared_ptr<const CompiledProgram> compiled, std::vector<RankGroupPtr> groups);

  const CompiledProgram& compiled() const { return *compiled_; }
  const Program& program() const { return compiled_->program(); }

  // Throws UserError if one of the groups was destroyed.
  c10::SmallVector<GroupLease, 4> lease_groups() const;
  const std::vector<RankGroupPtr>& groups() const { return groups_; }

  // Connects the groups once per device (Transport::connect). Collective among the ranks of all groups, in their order.
  // Throws c10::Error, on all ranks alike, if transfers cannot start now.
  void connect(const at::Device& device) const;
  // Returns whether tensors on this device must be copied to the host, because Gloo has no messages for them.
  bool goes_through_host(const at::Device& device) const;

  // From the program's origin: the steps that communicate, in order and the same on all ranks, and the ranks of the
  // mesh, row-major; with two meshes the ranks of both, ascending.
  std::vector<Communication> communications() const;
  std::vector<Rank> mesh_ranks() const;

 private:
  std::shared_ptr<const CompiledProgram> compiled_;
  std::vector<RankGroupPtr> groups_;
  mutable std::atomic<int> connected_device_{-1};  // the device for which all groups are known to be connected
};

using ExecutablePtr = std::shared_ptr<const Executable>;

at::ScalarType scalar_type_of(DType dtype);

// Throws a ValueError that names `argument` for undefined tensors and for those without strides: nested, sparse and
// MKL-DNN ones.
void check_strided(const at::Tensor& given, const std::string& argument);

}  // namespace shardwright
