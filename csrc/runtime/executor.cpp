#include "runtime/executor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/div.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "runtime/execution.h"
#include "runtime/issue_order.h"
#include "runtime/profiler_range.h"
#include "runtime/progress.h"
#include "support/error.h"

namespace shardwright {
namespace {

// The Work of an asynchronous program, for PyTorch's AsyncCollectiveTensor. It is done at the end of the program. Its
// destructor warns if the program has failed and nobody has waited for it.
class ExecutionWork : public c10d::Work {
 public:
  ExecutionWork(std::shared_ptr<Execution> execution, const at::Tensor& output)
      : execution_(std::move(execution)), output_(output.getIntrusivePtr()) {}
  ~ExecutionWork() override {
    if (!was_waited_for_ && execution_->failed()) {
      TORCH_WARN("shardwright: an asynchronous redistribute has failed, and nobody waited for its result. ",
                 "A wait for the result raises the error");
    }
  }

  bool isCompleted() override { return is_on_cpu() ? execution_->finished() : execution_->is_done(); }
  bool isSuccess() const override { return execution_->finished() && !execution_->failed(); }
  // Ignores the timeout: the transfers have the timeout of their group. Returns true, or throws if the program failed.
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    was_waited_for_ = true;
    if (!is_on_cpu()) return execution_->wait_for_end();
    execution_->finish();
    execution_->release();  // the progress thread may keep the run for a while
  }
  // Returns the output, if it still exists.
  std::vector<at::Tensor> result() override {
    const auto output = output_.lock();
    return output ? std::vector<at::Tensor>{at::Tensor(output)} : std::vector<at::Tensor>{};
  }

 private:
  bool is_on_cpu() const { return execution_->device().is_cpu(); }

  std::atomic<bool> was_waited_for_{false};
  std::shared_ptr<Execution> execution_;
  c10::weak_intrusive_ptr<c10::TensorImpl> output_;
};

// Returns the device of the first tensor; the CPU without tensors.
at::Device device_of(c10::ArrayRef<at::Tensor> tensors) {
  return tensors.empty() ? at::Device(at::kCPU) : tensors[0].device();
}

// Returns a copy of a tensor on another device, without a gradient.
at::Tensor copied_to(const at::Tensor& tensor, at::Device device) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return tensor.to(device);
}

// Computes the result of a program whose result is one box of the input (Program::box_of_input), perhaps divided. The
// result keeps the memory order of the input, as PyTorch's slices do. The box is divided once per instruction with a
// divisor.
at::Tensor take_box(const Program& program, const at::Tensor& input) {
  const c10::NoGradGuard no_grad;
  at::Tensor box = input.detach();
  for (size_t t = 0; t < program.outputs[0].shape.size(); ++t) {
    box = box.narrow(static_cast<int64_t>(t), (*program.box_of_input)[t], program.outputs[0].shape[t]);
  }
  bool divided = false;
  for (const Instruction& instruction : program.instructions) {
    const auto* divide = std::get_if<Divide>(&instruction.operation);
    const auto* copy = std::get_if<Copy>(&instruction.operation);
    const double divisor = divide != nullptr ? divide->divisor : copy != nullptr ? copy->divisor : 1;
    if (divisor == 1) continue;
    box = box.is_floating_point() || box.is_complex() ? at::div(box, divisor)
                                                      : at::div(box, static_cast<int64_t>(divisor));
    divided = true;
  }
  return divided ? box : box.clone();
}

// Returns the name under which profilers show a run.
std::string title_of(const Executable& executable) {
  const CompiledProgram& compiled = executable.compiled();
  return concat("shardwright::", compiled.origin().title(), ", ", compiled.received_bytes(), " bytes received");
}

// Shows a run to profilers until the ProfilerRange is destroyed. Makes no title if no profiler runs.
ProfilerRange profiler_range_of(const Executable& executable) {
  return ProfilerRange::is_wanted() ? ProfilerRange(title_of(executable)) : ProfilerRange();
}

// Counts a run on copies of device tensors in host memory, and warns once.
void count_host_copy(const at::Device& device) {
  ++counters().through_host;
  TORCH_WARN_ONCE("shardwright: tensors on ", device,
                  " are copied to host memory, redistributed there and copied back, ",
                  "because their process groups use Gloo; sw.stats()['through_host'] counts them");
}

// Runs a program to its end, with its transfers in the issue order (issue_order.h), and counts the run.
void run_to_end(const Executable& executable, const std::shared_ptr<Execution>& execution) {
  const CompiledProgram& compiled = executable.compiled();
  if (compiled.communicates()) {
    const auto advance = [&] { execution->start_all_transfers(); };
    if (execution->transfers_on_host()) {
      IssueOrder::issue_on(executable.groups(), execution, advance);
    } else {
      issue_order_of(execution->device()).issue(execution, advance);
    }
    counters().received_bytes += compiled.received_bytes();
  }
  execution->finish();
  ++counters().runs;
  if (compiled.program().stages_on_host) ++counters().through_host;
}

// Throws c10::ValueError if `out` does not meet the requirements of run_into.
void check_out(const CompiledProgram& compiled, const at::Tensor& input, const at::Tensor& out) {
  const std::vector<int64_t>& shape = compiled.program().outputs[0].shape;
  check_strided(out, "out");
  TORCH_CHECK_VALUE(!out.is_conj() && !out.is_neg(), "out must be a tensor whose memory holds its elements, got a ",
                    out.is_conj() ? "conjugated" : "negated", " view");
  TORCH_CHECK_VALUE(!compiled.divides_integers(),
                    "out must be None if integers become pending sums or averages, whose ",
                    "parts are floating-point, got ", c10::toString(out.scalar_type()));
  TORCH_CHECK_VALUE(out.sizes().equals(shape) && out.is_contiguous(), "out must be a contiguous tensor of shape ",
                    c10::IntArrayRef(shape), " on rank ", compiled.rank(), ", got shape ", out.sizes(), " and strides ",
                    out.strides());
  TORCH_CHECK_VALUE(out.scalar_type() == input.scalar_type() && out.device() == input.device(),
                    "out must have the input's dtype and device, ", c10::toString(input.scalar_type()), " on ",
                    input.device(), ", got ", c10::toString(out.scalar_type()), " on ", out.device());
  if (!out.is_alias_of(input) || input.numel() == 0) return;
  const std::optional<int64_t> offset = compiled.offset_of_input();
  const auto item_bytes = static_cast<int64_t>(out.element_size());
  const bool is_in_place = offset && input.is_contiguous() &&
                           static_cast<const char*>(input.const_data_ptr()) ==
                               static_cast<const char*>(out.const_data_ptr()) + *offset * item_bytes;
  TORCH_CHECK_VALUE(
      is_in_place, "out must not share memory with the input, got two views of one storage. Only a one-step gather of ",
      "a 1-D tensor may have its input in out, at its final offset");
}

// On CPU: runs the instructions before `until` on this thread, and leaves the later ones to a progress thread.
void start_on_host(const Executable& executable, const std::shared_ptr<Execution>& execution, int until) {
  // Dispatch modes of this thread must see all communications.
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) until = executable.compiled().last_communication() + 1;
  IssueOrder::issue_on(executable.groups(), execution, [&] { execution->run_until(until); });
  finish_on_progress_thread(executable.groups().empty() ? nullptr : executable.groups().front().get(), execution);
}

// On devices with streams: submits the whole program. The current stream gets the instructions up to the first Wait,
// and up to the last one that reads the input if the input may change. A side stream gets the later ones.
void start_on_streams(const CompiledProgram& compiled, const std::shared_ptr<Execution>& execution,
                      const at::Tensor& output, bool input_may_change) {
  const int until =
      input_may_change ? std::max(compiled.first_wait(), compiled.end_of_input_reads()) : compiled.first_wait();
  issue_order_of(execution->device()).issue_asynchronous(execution, output, [&] {
    execution->run_until(until);
    execution->submit_completion();
  });
}

// True if an asynchronous call would have nothing to wait for, goes through host memory, or replaces its output at the
// end, so that it runs as a synchronous call. On devices with streams there is something to wait for if any rank
// communicates, even if this rank does not: a reader on another stream must not read the result too early.
bool can_run_synchronously(const Executable& executable, const at::Tensor& input) {
  const CompiledProgram& compiled = executable.compiled();
  return !compiled.is_collective() || compiled.divides_integers() ||
         (input.device().is_cpu() && !compiled.communicates()) || executable.goes_through_host(input.device());
}

// Starts a program asynchronously. Returns the output and its Work. `out`: the tensor to write to, or null for a new
// one. `by_messages`: true to send exchanges on CPU as messages.
std::pair<at::Tensor, WorkPtr> start_execution(const ExecutablePtr& executable, const at::Tensor& input,
                                               const at::Tensor* out, bool input_may_change, bool by_messages) {
  const CompiledProgram& compiled = executable->compiled();
  executable->connect(input.device());
  const auto execution = std::make_shared<Execution>(executable, input, /*uses_side_stream=*/true);
  if (out != nullptr) execution->write_to(*out);
  const at::Tensor output = execution->output();  // allocated before anything runs, because the Work refers to it
  if (execution->device().is_cpu()) {
    if (input_may_change && compiled.reads_input_after_start()) execution->copy_input(input);
    if (by_messages) execution->exchange_by_messages();
    const int end = by_messages ? compiled.end_of_collectives() : compiled.last_communication() + 1;
    start_on_host(*executable, execution, std::max(compiled.first_wait(), end));
  } else {
    start_on_streams(compiled, execution, output, input_may_change);
  }
  ++counters().runs;
  counters().received_bytes += compiled.received_bytes();
  return {output, c10::make_intrusive<ExecutionWork>(execution, output)};
}

}  // namespace

Counters& counters() {
  static Counters instance;
  return instance;
}

at::Tensor run(const ExecutablePtr& executable, const at::Tensor& input) {
  const ProfilerRange range = profiler_range_of(*executable);
  const CompiledProgram& compiled = executable->compiled();
  compiled.check_tensors(input);
  if (compiled.returns_input()) return input;
  if (executable->goes_through_host(input.device())) {
    count_host_copy(input.device());
    return copied_to(run(executable, copied_to(input, at::kCPU)), input.device());
  }
  executable->connect(input.device());
  if (compiled.program().box_of_input && !input.is_contiguous()) {
    ++counters().runs;
    return take_box(compiled.program(), input);
  }
  const auto execution = std::make_shared<Execution>(executable, input, /*uses_side_stream=*/false);
  run_to_end(*executable, execution);
  return execution->output();
}

void check_out(const ExecutablePtr& executable, const at::Tensor& input, const at::Tensor& out) {
  check_out(executable->compiled(), input, out);
}

void run_into(const ExecutablePtr& executable, const at::Tensor& input, const at::Tensor& out) {
  const ProfilerRange range = profiler_range_of(*executable);
  const CompiledProgram& compiled = executable->compiled();
  compiled.check_tensors(input);
  check_out(compiled, input, out);
  if (compiled.returns_input()) {
    out.copy_(input);
    ++counters().runs;
    return;
  }
  if (executable->goes_through_host(input.device())) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor(out).copy_(run(executable, input));
    return;
  }
  executable->connect(input.device());
  const auto execution = std::make_shared<Execution>(executable, input, /*uses_side_stream=*/false);
  execution->write_to(out);
  run_to_end(*executable, execution);
}

std::vector<at::Tensor> run_all(const ExecutablePtr& executable, c10::ArrayRef<at::Tensor> tensors) {
  const ProfilerRange range = profiler_range_of(*executable);
  const CompiledProgram& compiled = executable->compiled();
  compiled.check_tensors(tensors);
  const at::Device device = device_of(tensors);
  if (executable->goes_through_host(device)) {
    count_host_copy(device);
    std::vector<at::Tensor> on_host;
    for (const at::Tensor& tensor : tensors) on_host.push_back(copied_to(tensor, at::kCPU));
    std::vector<at::Tensor> outputs = run_all(executable, on_host);
    for (at::Tensor& output : outputs) output = copied_to(output, device);
    return outputs;
  }
  executable->connect(device);
  const auto execution = std::make_shared<Execution>(executable, tensors, /*uses_side_stream=*/true);
  run_to_end(*executable, execution);
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < compiled.program().outputs.size(); ++i) outputs.push_back(execution->output(i));
  return outputs;
}

std::shared_ptr<Execution> start_all(const ExecutablePtr& executable, c10::ArrayRef<at::Tensor> tensors,
                                     const at::Tensor& token) {
  const ProfilerRange range = profiler_range_of(*executable);
  const CompiledProgram& compiled = executable->compiled();
  compiled.check_tensors(tensors);
  executable->connect(device_of(tensors));
  const auto execution = std::make_shared<Execution>(executable, tensors, /*uses_side_stream=*/true);
  if (compiled.program().stages_on_host) {
    run_to_end(*executable, execution);
    return execution;
  }
  if (execution->transfers_on_host()) {
    execution->exchange_by_messages();
    start_on_host(*executable, execution, compiled.end_of_first_transfers());
  } else {
    issue_order_of(execution->device()).issue_asynchronous(execution, token, [&] { execution->submit_completion(); });
  }
  ++counters().runs;
  counters().received_bytes += compiled.received_bytes();
  return execution;
}

std::pair<at::Tensor, WorkPtr> start(const ExecutablePtr& executable, const at::Tensor& input, bool input_may_change,
                                     bool by_messages) {
  const ProfilerRange range = profiler_range_of(*executable);
  if (executable->compiled().returns_input()) return {run(executable, input), nullptr};
  executable->compiled().check_tensors(input);
  if (can_run_synchronously(*executable, input)) return {run(executable, input), nullptr};
  return start_execution(executable, input, nullptr, input_may_change, by_messages);
}

WorkPtr start_into(const ExecutablePtr& executable, const at::Tensor& input, const at::Tensor& out) {
  const ProfilerRange range = profiler_range_of(*executable);
  executable->compiled().check_tensors(input);
  if (executable->compiled().returns_input() || can_run_synchronously(*executable, input)) {
    run_into(executable, input, out);
    return nullptr;
  }
  check_out(executable->compiled(), input, out);
  return start_execution(executable, input, &out, /*input_may_change=*/false, /*by_messages=*/true).second;
}

}  // namespace shardwright
