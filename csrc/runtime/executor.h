// Runs a rank's program over c10d process groups.
//
// Who advances a program: the thread that started it; for a synchronous call to the end. Where the device has streams,
// an asynchronous call too gives all of its program to the device before it returns. On CPU it returns at the first
// Wait, and a progress thread (progress.h) does the rest, whether or not anybody waits; the next program that is
// started on the same device first makes every program before it start all its communications. So the order in which
// our collectives are started is the order in which programs were, on every rank, whenever each rank happens to wait.
// Among the collectives that others start on the same groups, those that an asynchronous program starts on the progress
// thread have no place that is the same on all ranks: each comes to them when it does. So on CPU they go as messages,
// which need none, and a call that has native collectives returns once these have started.
//
// Inputs: once an asynchronous call has returned, the caller may write to its input. On CPU nothing reads it any more:
// what would be read later was copied. On other devices packing and copying stand on the caller's stream before
// whatever the caller does next; only a transfer that sends the input's own memory may still read it, as PyTorch's
// asynchronous collectives do.
//
// Streams: a program computes on the caller's stream, its home. Transfers of asynchronous calls and of programs with
// products run on the device's stream for transfers (side_stream.h). What an asynchronous call has left to do after its
// first transfers goes to another stream beside the caller's, and whoever waits makes its own stream wait for the end.
// Other transfers run on the caller's stream, behind asynchronous programs that nobody has waited for. The host waits
// for nothing.
//
// Memory comes from the home's part of the allocator, and goes back to it when the home has been made to wait for
// whatever used it; if it never is, because nobody waits, the allocator is told which streams did.
//
// Failures: a transfer that fails or times out raises on this rank an error that names rank, plan, step and group. The
// input is never written.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "program/program.h"
#include "program/strided_copy.h"
#include "runtime/c10d_adapter.h"

namespace shardwright {

class Execution;

// What a step of a plan that communicates means, whatever messages carry it out.
struct Communication {
  std::string op;         // as step_op_name says
  std::string reduce_op;  // of reductions
  std::vector<int> mesh_dims;
  int64_t group_size = 0;
  int64_t gather_dim = 0;  // of an all_to_all between two cuts: the tensor dims that were and are cut
  int64_t shard_dim = 0;
};

// Throws ValueError naming `argument` for tensors without strides: nested, sparse and MKL-DNN ones, and none at all.
void check_strided(const at::Tensor& given, const std::string& argument);

// A compiled program bound to process groups, held by std::shared_ptr: its runs keep it alive.
class Executable : public std::enable_shared_from_this<Executable> {
 public:
  // Takes the plan's own bytes and the rank to run it for; throws UserError if the rank is not on the mesh.
  Executable(const std::string& plan_bytes, int64_t rank);

  // A program of another compiler, with what ranks that run it have in common.
  using Signature = std::vector<std::pair<std::string, std::string>>;
  Executable(Program program, const std::vector<const Plan*>& plans, std::string text, Signature signature,
             int64_t rank);

  const Program& program() const { return program_; }

  // One process group per entry of program().groups, with the same ranks in the same order. They are not kept alive.
  void bind(const std::vector<comm::GroupPtr>& groups);
  bool is_bound_to(const std::vector<comm::GroupPtr>& groups) const;

  // `input`: of the shape that the program has for it, the plan's dtype, any strides. Returns a new tensor, or
  // `input` itself where nothing is to be done. Throws c10::ValueError on another shape or element size, with nothing
  // sent.
  at::Tensor run(const at::Tensor& input) const;

  // The same into `out`: contiguous, of the output's shape, the input's dtype and device, no memory of it the input's.
  // Throws c10::ValueError where it is not.
  void run_into(const at::Tensor& input, const at::Tensor& out) const;

  // All inputs and outputs of a program that has several; its transfers go beside its compute.
  std::vector<at::Tensor> run_all(c10::ArrayRef<at::Tensor> inputs) const;

  // `run`, returning once the first communication is under way. The Work is null where nothing is pending.
  // `input_may_change`: whether the caller may write to `input` before the Work is done.
  std::pair<at::Tensor, comm::WorkPtr> start(const at::Tensor& input, bool input_may_change = true) const;

  // Of the plan, in its order; the same on all ranks.
  const std::vector<Communication>& communications() const { return communications_; }
  bool communicates() const { return communicates_; }
  int64_t received_bytes() const { return received_bytes_; }
  // Whether process groups do not take the dtype.
  bool travels_as_bytes() const { return travels_as_bytes_; }
  const std::string& text() const { return text_; }
  // What ranks that run the same redistribute have in common, by name.
  const Signature& signature() const { return signature_; }
  // The ranks of the plan's mesh, row-major.
  const std::vector<int64_t>& mesh_ranks() const { return mesh_ranks_; }
  int64_t rank() const { return rank_; }
  // Throws UserError where one of them was destroyed.
  c10::SmallVector<comm::GroupPtr, 4> groups() const;
  const Program::Lifetimes& lifetimes() const { return lifetimes_; }
  // Of an instruction that copies, prepared.
  const StridedCopy& copy(int instruction) const { return copies_.at(instruction); }
  int last_communication() const { return last_communication_; }
  // Of a transfer, as order_of_transfers says; and whether a transfer asks for the place of a compute instruction.
  int order_of(int transfer) const { return order_of_transfers_[transfer]; }
  bool is_asked_for(int instruction) const { return is_asked_for_[instruction]; }
  // Of buffers that hold the program's own dtype, for a run with these inputs.
  at::TensorOptions options_like(c10::ArrayRef<at::Tensor> inputs) const;
  at::TensorOptions options_of(int buffer, const at::TensorOptions& usual) const;

 private:
  void describe(const std::vector<const Plan*>& plans, const char* title);
  void note_input_reads();
  bool returns_input() const { return program_.is_input(program_.outputs[0].buffer); }
  // See communicators.h; once per device. Collective among the ranks of all groups.
  void make_communicators(const at::Device& device) const;
  // Whether tensors there must be copied to the host, because Gloo has no messages for them.
  bool goes_through_host(const at::Device& device) const;
  void count_way_through_host(const at::Device& device) const;
  void start_on_cpu(const std::shared_ptr<Execution>& execution, const at::Tensor& input, bool input_may_change) const;
  void start_on_streams(const std::shared_ptr<Execution>& execution, const at::Tensor& output,
                        bool input_may_change) const;
  void check_inputs(c10::ArrayRef<at::Tensor> inputs) const;
  at::Tensor take_box(const at::Tensor& input) const;
  at::Tensor complete(const std::shared_ptr<Execution>& execution) const;

  Program program_;
  Program::Lifetimes lifetimes_;
  std::vector<int> order_of_transfers_;  // empty where transfers are Gloo's
  std::vector<bool> is_asked_for_;
  std::unordered_map<int, StridedCopy> copies_;
  std::unordered_map<int, at::ScalarType> other_dtypes_;  // by buffer
  int usual_input_ = -1;                                  // the first that is of the program's own dtype
  std::vector<comm::WeakGroupPtr> groups_;
  std::string text_;
  Signature signature_;
  std::vector<Communication> communications_;
  std::string title_;  // for profilers
  std::vector<int64_t> mesh_ranks_;
  int64_t rank_ = -1;
  Backend backend_ = Backend::kNccl;  // that the plan is for
  mutable std::atomic<int> ready_device_{-1};
  int64_t received_bytes_ = 0;
  int last_communication_ = -1;  // index of the instruction
  int first_wait_ = 0;           // likewise; without any, the number of instructions
  // After the last instruction that reads an input, transfers that read it before the first Wait left out.
  int end_of_input_reads_ = 0;
  // After the last native collective, whose place among those of others on the group counts.
  int end_of_collectives_ = 0;
  bool reads_input_after_start_ = false;  // in transfers, or after the first Wait
  bool communicates_ = false;
  bool travels_as_bytes_ = false;
};

// Makes every program that was started, on any device, start all its communications; to be called before groups are
// made.
void drain_lanes();

// Since the start of the process or the last reset.
struct Counters {
  std::atomic<int64_t> runs{0};
  std::atomic<int64_t> received_bytes{0};
  std::atomic<int64_t> through_host{0};  // those of tensors that were copied to host memory for Gloo
};
Counters& counters();

}  // namespace shardwright
