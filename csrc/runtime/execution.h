// One run of an Executable: its buffers, the transfers under way, and its progress.
//
// Terms
//   home stream   the stream that is current when the run begins; the program computes and allocates memory on it
//   destination   a tensor of the caller, parts of which the program writes (program/program.h)
//   ticket        the index of the instruction that starts a transfer; a Wait has the ticket of its transfer
//   completion    the instructions of an asynchronous program that do not run on the caller's stream, but on
//                 SideStream::kCompletion
//
// State: `next_` is the index of the next instruction. Each instruction runs once, in order, under `mutex_`, on the
// first thread that reaches it. An instruction that throws sets `failure_` and moves `next_` to the end, so that no
// later instruction runs.
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
  // `tensors` are the program's inputs, then its destinations, and pass CompiledProgram::check_tensors. The current
  // stream becomes the home stream. On devices with streams, transfers run on a side stream if `uses_side_stream`, else
  // on the home stream. Throws UserError if a group was destroyed, or as check_flags does.
  Execution(ExecutablePtr executable, c10::ArrayRef<at::Tensor> tensors, bool uses_side_stream);
  // Transfers may still be under way on the device; their memory is not reused before they are done.
  ~Execution();
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  // Makes `out` the first output. It must be contiguous and have the output's shape. Call it before the first
  // instruction.
  void write_to(const at::Tensor& out);

  // Makes exchanges use messages instead of collectives. Messages have a tag of their own, so their order relative to
  // other collectives on the group does not matter. Call it on all ranks, before the first instruction.
  void exchange_by_messages() { exchanges_by_messages_ = true; }

  // Replaces the input of a program with one input by a copy, so that the caller may change the input. Call it before
  // the first instruction.
  void copy_input(const at::Tensor& input);

  // Returns an output. It is allocated by the first instruction that writes it, or by the first call of this function.
  const at::Tensor& output(size_t index = 0);
  const CompiledProgram& compiled() const { return compiled_; }
  const at::Device& device() const { return device_; }
  // True if transfers use host memory and waits for them block the host: on CPU, and with Gloo.
  bool transfers_on_host() const { return transfers_on_host_; }

  // Any thread may call the next four functions, any number of times. The error of an instruction is raised by the call
  // that runs it, and by every later `finish`.
  void run_until(int instruction);  // runs the instructions with indices below `instruction`
  void run_next();                  // runs the next instruction, if any is left
  void start_all_transfers();       // runs the instructions up to and including the last transfer
  void finish();                    // runs all instructions
  // True once every instruction has run or one has failed. The device may still execute the work that they submitted;
  // see is_done.
  bool finished() const { return next_ == num_instructions_; }
  // True once every transfer of the program has been started, or an instruction has failed.
  bool all_transfers_started() const { return next_ > compiled_.last_communication(); }
  // True once an instruction has failed. Takes no lock: the caller may hold the GIL, and a thread that runs an
  // instruction may need the GIL to free a tensor.
  bool failed() const { return has_failed_; }
  // Drops the buffers, the outputs, the events of transfers and the leases of groups. Call it only once the run is
  // finished.
  void release();

  // Submits all remaining instructions to SideStream::kCompletion, so that the caller's stream can continue. Raises the
  // error of an instruction that fails. Only for devices with streams.
  void submit_completion();
  // Makes the current stream wait for the end of the program, after submit_completion. Raises the error of an
  // instruction that failed, and c10::Error as check_capture does. Any thread may call it, any number of times.
  void wait_for_end();
  // Waits for the instructions with indices below `instruction`. Before submit_completion, the host waits. After it,
  // the current stream waits for the end of the step that contains the last of these instructions (ends_step); this
  // needs a program with destinations. Raises the same errors as wait_for_end.
  void wait_until(int instruction);
  // Returns true once the device has finished the program or an instruction has failed; before submit_completion, once
  // finished().
  bool is_done() const;
  // Releases the buffers of a program that nobody will wait for. The allocator reuses their memory once the side
  // streams have passed the work submitted so far.
  void abandon() noexcept;
  // True once `wait_for_end` has made a stream wait.
  bool is_waited_for() const { return is_waited_for_; }

 private:
  // Like run_until, but also raises the error of an instruction that failed earlier.
  void finish_until(int instruction);
  // Runs the next instruction. Allocates the buffers that it is the first to use, and frees those that it is the last
  // to use. If the instruction throws, calls `fail`.
  void run_instruction();
  // In the following functions, `index` is the index of the instruction that has the operation.
  // Runs an operation: a Wait, a transfer, or a computation, which is also traced.
  void execute(const Operation& operation, int index);
  // Starts a transfer by its group's transport, on the current stream, and stores the handles in `works_`.
  void call_transport(const Operation& operation, int index);
  // Starts a transfer on the stream for transfers, makes that stream wait for it and records an event. If the host
  // carries out transfers, only starts it.
  void start_transfer(const Operation& operation, int index);
  // Makes SideStream::kTransfers current until the caller destroys `side`. The side stream first waits for the
  // predecessor of the transfer with index `transfer` (CompiledProgram::predecessor_of).
  void enter_side_stream(std::optional<SideStreamGuard>& side, int transfer) const;
  // Waits for a transfer: the host waits, or the current stream.
  void wait(int ticket);
  // Runs an operation that is neither a transfer nor a Wait.
  void compute(const Operation& operation, int index);
  // True if a trace is being taken and no graph is being captured.
  bool is_traced() const;
  // Returns the number of this run in traces; the first call takes the next free number.
  int64_t run_number();
  // Returns the hints for a product that is submitted now: if transfers are under way, it leaves multiprocessors to
  // them.
  GemmHints gemm_hints() const;
  // Ends the run. Stores and raises a c10::DistBackendError that names rank, step, group, plan and reason.
  [[noreturn]] void fail(int index, const std::string& reason);
  // Returns " in the group of ranks (...)" for an instruction that communicates, for error messages; else "".
  std::string group_text(int index) const;
  // Allocates a temporary or an output. If the output is the buffer of an input, makes it a view of that input.
  void allocate(BufferId buffer);
  // Tells the allocator that the current stream may read the buffers, if it is not the home stream, whose later
  // allocations would otherwise reuse their memory too early.
  void record_uses_on_current_stream() const;
  // Throws c10::Error if a graph is being captured now but was not when the program was started, or the reverse.
  void check_capture() const;
  // True if the instruction after this one is a Wait or belongs to another plan step, or if this one is the last.
  bool ends_step(int instruction) const;
  // Copies boxes of elements. Casts or divides the elements if the instruction says so.
  void copy(const Copy& copy, int index);
  // Returns a buffer as a tensor of `dtype`, for a copy to read or write.
  at::Tensor buffer_as(BufferId buffer, DType dtype) const;
  // Returns a range of a buffer as a flat tensor.
  at::Tensor range(const BufferRange& range) const;
  // Returns the address of the first element of a range.
  char* address(const BufferRange& range) const;
  // True if the input is already in its place in buffer `dst` (CompiledProgram::offset_of_input), so that no copy is
  // needed.
  bool is_input_in_place(BufferId dst) const;
  // Returns a range as a flat tensor for a process group: as bytes if process groups do not support the dtype.
  at::Tensor transfer_view(const BufferRange& range) const;
  void reduce(const Reduce& reduce);
  void divide(const Divide& divide);
  void multiply(const Gemm& gemm, int index);
  // Throws UserError if the group or the device does not support products that wait for flags, or in a capture. The
  // program has such a product.
  void check_flags() const;
  // Submits a product that waits for flags, and a check that the device finishes it within the group's timeout.
  void multiply_flagged(const Gemm& gemm, int index);
  // Starts an AllToAll as one collective.
  void all_to_all(const AllToAll& move, int index);
  // Starts an AllToAll as one message per peer.
  void send_all_to_all(const AllToAll& move, int index);

  ExecutablePtr executable_;
  const CompiledProgram& compiled_;
  const Program& program_;
  at::TensorOptions options_;  // options of the buffers of the program's own dtype (executable.h)
  at::Device device_;
  std::vector<at::Tensor> buffers_;          // by BufferId; flat, except tensors of the caller with strides
  c10::SmallVector<at::Tensor, 2> outputs_;  // in the program's shapes; undefined until they are allocated
  std::vector<std::vector<WorkPtr>> works_;  // by instruction: handles of a transfer that nobody has waited for
  // Events after each transfer on the side stream, by instruction; empty without side streams.
  std::vector<std::optional<StreamEvent>> transfer_ends_;
  std::optional<c10::Stream> home_stream_;  // the home stream; none on CPU
  // Only if transfers run on a side stream: events at the start of the run, and, by instruction, after each predecessor
  // of a transfer (CompiledProgram::predecessor_of).
  std::optional<StreamEvent> begin_event_;
  std::vector<std::optional<StreamEvent>> predecessor_events_;
  // Once the completion is submitted: the buffers that were allocated on the home stream before, and the event at the
  // end of the program.
  std::vector<at::Tensor> home_buffers_;
  std::optional<StreamEvent> end_event_;
  // Events of the completion, only in programs with destinations. The event with key i was recorded after instruction
  // i - 1, which ends a step (ends_step).
  std::map<int, StreamEvent> step_ends_;
  bool is_completing_ = false;       // submit_completion was called
  bool started_in_capture_ = false;  // a graph was being captured when the completion was submitted
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
  mutable std::recursive_mutex mutex_;  // a thread releases it at least at the end of each step
};

}  // namespace shardwright
