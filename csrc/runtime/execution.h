// One run of an Executable: its buffers, the transfers under way, and its progress.
//
// Terms
//   home stream   the stream that is current when the run begins; the program computes and allocates memory on it
//   destination   a tensor of the caller, parts of which the program writes (program/program.h)
//   ticket        the index of the instruction that starts a transfer; a Wait names its transfer by the ticket
//   completion    the instructions of an asynchronous program that do not run on the caller's stream, but on
//                 SideStream::kCompletion
//
// State: `next_` is the index of the next instruction. Each instruction runs once, in order, under `mutex_`, on
// whichever thread gets there first. The first instruction that throws sets `failure_` and moves `next_` past the end.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime/executable.h"
#include "runtime/gemm.h"
#include "runtime/side_stream.h"
#include "runtime/trace.h"

namespace shardwright {

class Execution {
 public:
  // `tensors` are the program's inputs, then its destinations. The current stream becomes the home stream. On devices
  // with streams, transfers run on a side stream if `uses_side_stream`, else on the home stream.
  Execution(ExecutablePtr executable, c10::ArrayRef<at::Tensor> tensors, bool uses_side_stream);
  // Transfers may still be under way on the device; their memory is not reused before they are done.
  ~Execution();
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  // Writes the first output to `out`, contiguous and of the right shape. Call it before anything runs.
  void write_to(const at::Tensor& out);

  // Sends exchanges as messages with a tag of their own. Other collectives on the group do not match them, so the order
  // relative to those does not matter. Call it on all ranks, before anything runs.
  void exchange_by_messages() { exchanges_by_messages_ = true; }

  // Copies the input of a program with one input, so that the input's own memory is not read later. Call it before
  // anything runs.
  void copy_input(const at::Tensor& input);

  // Returns an output. It is allocated by the first instruction that writes it, or by the first call of this function.
  const at::Tensor& output(size_t index = 0);
  const CompiledProgram& compiled() const { return compiled_; }
  const at::Device& device() const { return device_; }
  // True if the host carries out transfers, in host memory.
  bool transfers_on_host() const { return transfers_on_host_; }

  // Any thread may call these functions, any number of times. Every instruction runs once, in order. A failure is
  // raised by the call in which it happens and by every later `finish`.
  void run_until(int instruction);  // runs the instructions with indices below `instruction`
  void run_next();                  // runs the next instruction, if any is left
  void start_all_transfers();       // runs the instructions up to and including the last transfer
  void finish();                    // runs all instructions
  // True once every instruction has run, or one has failed. On devices with streams, a finished run may still have work
  // on the device.
  bool finished() const { return next_ == num_instructions_; }
  // True once every transfer of the program has been started.
  bool all_transfers_started() const { return next_ > compiled_.last_communication(); }
  // True once an instruction has failed. Takes no lock: the caller may hold the GIL, and a thread that runs an
  // instruction may need the GIL to free a tensor.
  bool failed() const { return has_failed_; }
  // Drops the buffers, the outputs and the leases of groups. Call it only once the run is finished.
  void release();

  // Submits all remaining instructions to SideStream::kCompletion, so that the caller's stream can continue. Only for
  // devices with streams.
  void submit_completion();
  // Makes the current stream wait for the end of the program. Throws c10::Error if a graph is being captured now but
  // was not when the program was started, or the reverse. May be called by several threads, each any number of times.
  void wait_for_end();
  // Waits for all instructions before this one: on the current stream as wait_for_end does, else on the host. On
  // streams it may wait for more, up to the end of a step, and the program must have destinations.
  void wait_until(int instruction);
  // Returns true once the device has finished the program.
  bool is_done() const;
  // Releases an execution that nobody will wait for. Its memory is reused once the device is done with it.
  void abandon() noexcept;
  // True once `wait_for_end` has made a stream wait.
  bool is_waited_for() const { return is_waited_for_; }

 private:
  void finish_until(int instruction);  // like run_until; also raises the failure of an earlier instruction
  // Runs the next instruction: allocates the buffers whose life begins with it, and frees those whose life ends with
  // it.
  void run_instruction();
  // In the following functions, `index` is the index of the instruction that has the operation.
  // Runs an operation: a Wait, a transfer, or a computation, which is also traced.
  void execute(const Operation& operation, int index);
  // Passes a transfer to its group's transport, on the current stream, and stores the handles in `works_`.
  void transfer(const Operation& operation, int index);
  // Runs `transfer` on the stream for transfers, and records its end there. On the host it only starts the transfer.
  void start_transfer(const Operation& operation, int index);
  // Makes the side stream for transfers current, until the caller destroys `side`.
  void enter_side_stream(std::optional<SideStreamGuard>& side, int transfer) const;
  // Waits for a transfer: on the host, or by making the current stream wait for it.
  void wait(int ticket);
  // Runs an operation that is neither a transfer nor a Wait.
  void compute(const Operation& operation, int index);
  // True if instructions that run now are recorded in a trace.
  bool is_traced() const;
  // Returns the number of this run in traces; the first call takes the next free number.
  int64_t run_number();
  // Returns the hints for a product that is submitted now. If transfers are under way, it leaves multiprocessors to
  // them.
  GemmHints gemm_hints() const;
  // Stores and raises the error of a failed instruction, which names rank, step, group, plan and reason.
  [[noreturn]] void fail(int index, const std::string& reason);
  // Returns the ranks of the group in which an instruction communicates, for an error message; else an empty string.
  std::string group_text(int index) const;
  // Allocates a temporary or an output. An output that is an input becomes a view of it.
  void allocate(BufferId buffer);
  // Throws c10::Error if a graph is being captured now but was not when the program was started, or the reverse.
  void check_capture() const;
  // True if an instruction is the last one of its plan step, of the part of a step before a Wait, or of the program.
  bool ends_step(int instruction) const;
  // Copies boxes of elements. Casts or divides the elements if the instruction says so.
  void copy(const Copy& copy, int index);
  // Returns a buffer as elements of `dtype`, for a copy to read or write.
  at::Tensor buffer_as(BufferId buffer, DType dtype) const;
  // Return a range of a buffer: as a flat tensor, or the address of its first element.
  at::Tensor range(const BufferRange& range) const;
  char* address(const BufferRange& range) const;
  // True if buffer `dst` already holds the input at its offset (CompiledProgram::offset_of_input), so that no copy is
  // needed.
  bool has_input_in_place(BufferId dst) const;
  // Returns a range as process groups transfer it: as bytes if they do not support the dtype.
  at::Tensor transfer_view(const BufferRange& range) const;
  void reduce(const Reduce& reduce);
  void divide(const Divide& divide);
  void multiply(const Gemm& gemm, int index);
  // Throws UserError if the program's group or device does not support its product that waits for flags.
  void check_flags() const;
  // Submits a product that waits for flags, and a check that the device finishes it within the group's timeout.
  void multiply_flagged(const Gemm& gemm, int index);
  // Start an AllToAll: by the transport's own all-to-all, or as one message per peer.
  void all_to_all(const AllToAll& move, int index);
  void send_all_to_all(const AllToAll& move, int index);

  ExecutablePtr executable_;
  const CompiledProgram& compiled_;
  const Program& program_;
  at::TensorOptions options_;  // of buffers of the program's own dtype (executable.h)
  at::Device device_;
  std::vector<at::Tensor> buffers_;          // by BufferId; flat, except tensors of the caller with strides
  c10::SmallVector<at::Tensor, 2> outputs_;  // in the program's shapes; undefined until they are allocated
  std::vector<std::vector<WorkPtr>> works_;  // by instruction: handles of a transfer under way
  // Events after each transfer on the side stream, by instruction; empty without side streams.
  std::vector<std::optional<StreamEvent>> transfer_ends_;
  std::optional<c10::Stream> home_stream_;  // the home stream; none on CPU
  // Events on the home stream, if transfers run on a side stream: at the start of the run, and after each instruction
  // for which some transfer must wait.
  std::optional<StreamEvent> begin_event_;
  std::vector<std::optional<StreamEvent>> order_events_;
  // Once the completion is submitted: the buffers that were allocated on the home stream before, and the event at the
  // end of the program.
  std::vector<at::Tensor> home_buffers_;
  std::optional<StreamEvent> end_event_;
  std::map<int, StreamEvent> step_ends_;  // ends of steps, by the next instruction; only with destinations
  bool is_completing_ = false;            // submit_completion was called
  bool started_in_capture_ = false;       // a graph was being captured when the completion was submitted
  std::atomic<bool> is_waited_for_{false};
  std::vector<TraceSpan> spans_;            // by instruction, while a trace is taken
  int64_t run_number_ = 0;                  // number of this run in a trace; 0: none yet
  c10::SmallVector<GroupLease, 4> groups_;  // by index in Program::groups
  int num_instructions_ = 0;
  int num_under_way_ = 0;               // transfers that were started and not yet waited for
  bool is_on_cpu_ = false;              // the tensors are CPU tensors
  bool transfers_on_host_ = false;      // the host carries out transfers
  bool uses_side_stream_ = false;       // transfers run on SideStream::kTransfers
  bool has_staged_input_ = false;       // the input's buffer is a copy in staging memory (copy_input)
  bool exchanges_by_messages_ = false;  // an AllToAll is sent as one message per peer
  std::atomic<int> next_{0};            // index of the next instruction
  std::exception_ptr failure_;          // the first failure of an instruction
  std::atomic<bool> has_failed_{false};
  mutable std::recursive_mutex mutex_;  // held to the end of a step at most
};

}  // namespace shardwright
