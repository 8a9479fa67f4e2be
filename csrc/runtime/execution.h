// One run of an Executable: its buffers, the transfers under way, and how far it has come.
//
// State: `next_` is the index of the next instruction. Instructions run in order, each once, each under `mutex_`, by
// whichever thread comes first. `failure_` is set by the first one that throws; `next_` is then past the end.
#pragma once

#include <c10/core/Event.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <exception>
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
  // With `is_beside_compute`, transfers run on a stream of their own, else on the current one, where the device has
  // streams. The stream that is current now is the home of the execution: compute runs there, and buffers are allocated
  // from its memory.
  Execution(ExecutablePtr executable, c10::ArrayRef<at::Tensor> inputs, bool is_beside_compute);
  // Where the device has streams, transfers under way may go on; their memory is not reused before they are done.
  ~Execution();
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  // Writes the first output to `out`, contiguous and of the right shape. Call it before anything runs.
  void write_to(const at::Tensor& out);

  // Sends exchanges as messages with a tag of their own, which collectives of others on the same group do not match. So
  // it does not matter when they start relative to these. Call it on all ranks, before anything runs.
  void exchange_by_messages() { exchanges_by_messages_ = true; }

  // For a program with one input: copies it, so that its own memory is not read from here on. Call it before anything
  // runs.
  void copy_input(const at::Tensor& input);

  // Allocated by the first instruction that writes it, or by the first to ask for it here.
  const at::Tensor& output(size_t index = 0);
  const at::Device& device() const { return device_; }

  // Several threads may call these, each any number of times; every instruction runs once, in order. A failure is
  // raised by the call that ran into it and by every later `finish`.
  void start_until(int instruction);  // exclusive
  void run_next();                    // one instruction, if any is left
  void start_all();                   // up to and including the last communication
  void finish();
  bool finished() const { return next_ == num_instructions_; }
  bool all_started() const { return next_ > compiled_.last_communication(); }
  bool failed() const;
  // Drops all tensors. Only once it is finished.
  void release();

  // Where the device has streams: gives the rest of the program to a stream of its own (SideStream::kRest), so that the
  // caller's stream can continue until `wait_for_end`.
  void start_rest_beside();
  // The current stream waits for the end of the program. Throws c10::Error where a graph is captured now and was not
  // when it was started, or the other way round. May be called by several threads, each any number of times.
  void wait_for_end();
  // The same for order alone, for a program that does not touch the result. Does nothing where only one of the two is
  // in a capture: replays come after whatever they are launched after.
  void order_before_current();
  // Whether the device has finished the program.
  bool is_done() const;
  // For an execution that nobody will wait for: its memory is reused once the device is done with it.
  void abandon() noexcept;
  bool is_waited_for() const { return is_waited_for_; }

 private:
  void step();
  void execute(const Operation& operation, int index);
  // The transfer of an instruction, on whatever stream is current.
  void transfer(const Operation& operation, int index);
  void start_transfer(const Operation& operation, int index);
  void go_to_side_stream(std::optional<SideStreamGuard>& side, int transfer) const;
  void wait(int ticket);
  void compute(const Operation& operation, int index);
  bool takes_spans() const;
  int64_t run_number();
  // Of products that are given to the device now.
  GemmHints hints() const;
  // Raises what every rank raises: rank, step, group, plan and reason.
  [[noreturn]] void fail(int index, const std::string& reason);
  std::string group_text(int index) const;
  void allocate(BufferId buffer);
  at::Tensor range(const BufferRange& range) const;
  char* data(const BufferRange& range) const;
  // As bytes where process groups do not take the dtype.
  at::Tensor wire(const BufferRange& range) const;
  void reduce(const Reduce& reduce);
  void divide(const Divide& divide);
  void multiply(const Gemm& gemm);
  void all_to_all(const AllToAll& move, int index);
  void send_all_to_all(const AllToAll& move, int index);

  ExecutablePtr executable_;
  const CompiledProgram& compiled_;
  const Program& program_;
  at::TensorOptions options_;
  at::Device device_;
  std::vector<at::Tensor> buffers_;          // flat
  c10::SmallVector<at::Tensor, 2> outputs_;  // shaped
  std::vector<std::vector<WorkPtr>> works_;  // by instruction
  // By instruction, where there are streams: when the side stream is done with the transfer.
  std::vector<std::optional<c10::Event>> transferred_;
  std::optional<c10::Stream> home_;
  // Beside compute: where the home stream was when the run began, and behind instructions that transfers ask for.
  std::optional<c10::Event> begin_;
  std::vector<std::optional<c10::Event>> marks_;
  // Of a program whose rest went beside: what was allocated on its home before, and the end.
  std::vector<at::Tensor> kept_;
  std::optional<c10::Event> end_;
  bool started_in_capture_ = false;
  std::atomic<bool> is_waited_for_{false};
  std::vector<TraceSpan> spans_;  // by instruction, while a trace is taken
  int64_t run_number_ = 0;        // of this run in a trace; 0: not given yet
  c10::SmallVector<GroupLease, 4> groups_;
  int num_instructions_ = 0;
  int num_under_way_ = 0;  // transfers that were started and not waited for
  bool is_on_cpu_ = false;
  bool is_beside_compute_ = false;
  bool owns_input_ = false;
  bool exchanges_by_messages_ = false;
  std::atomic<int> next_{0};
  std::exception_ptr failure_;
  mutable std::recursive_mutex mutex_;  // held for one instruction at a time
};

}  // namespace shardwright
