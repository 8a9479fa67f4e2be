#include "runtime/execution.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/pow.h>
#include <c10/core/DeviceGuard.h>

#include "runtime/arena_view.h"
#include "runtime/attend.h"
#include "runtime/flat.h"
#include "runtime/local_ops.h"
#include "runtime/profiler_range.h"
#include "runtime/side_stream.h"
#include "runtime/staging.h"
#include "support/error.h"

namespace shardwright {

namespace {

// While this guard exists, operations are neither recorded nor inspected by autograd.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// Returns a flat tensor of the elements in row-major order. It is a view if the tensor is already row-major.
at::Tensor flat_row_major(const at::Tensor& input) {
  at::Tensor resolved = input.is_conj() || input.is_neg() ? input.resolve_conj().resolve_neg() : input;
  if (!resolved.is_contiguous()) resolved = resolved.contiguous();
  return flat_view(resolved, 0, resolved.numel());
}

// Shows the plan step of the current instruction to profilers.
class StepRange {
 public:
  // Shows the step of an instruction, unless that step is already shown.
  void at(const Program& program, int instruction) {
    const int step = program.instructions[instruction].step;
    if (step == step_ || !ProfilerRange::is_wanted()) return;
    step_ = step;
    const bool has_note = static_cast<size_t>(step) < program.step_notes.size();
    range_.show(concat("shardwright::", program.step_texts[step], has_note ? program.step_notes[step] : ""));
  }

 private:
  ProfilerRange range_;
  int step_ = -1;
};

}  // namespace

Execution::Execution(ExecutablePtr executable, c10::ArrayRef<at::Tensor> tensors, bool uses_side_stream)
    : executable_(std::move(executable)),
      compiled_(executable_->compiled()),
      program_(compiled_.program()),
      options_(compiled_.own_options(tensors)),
      device_(options_.device()),
      buffers_(program_.buffers.size()),
      outputs_(program_.outputs.size()),
      works_(program_.instructions.size()),
      groups_(executable_->lease_groups()),
      num_instructions_(static_cast<int>(program_.instructions.size())),
      is_on_cpu_(device_.is_cpu()),
      transfers_on_host_(is_on_cpu_ || !compiled_.lowering().is_on_device),
      uses_side_stream_(uses_side_stream && !transfers_on_host_) {
  if (compiled_.flagged_product() >= 0) check_flags();
  const BelowAutograd guard;
  for (size_t i = 0; i < tensors.size(); ++i) {
    buffers_[i] =
        program_.buffers[i].strides ? tensors[i] : flat_row_major(is_on_cpu_ ? tensors[i] : on_arena(tensors[i]));
  }
  if (!is_on_cpu_) home_stream_ = current_stream(device_);
  if (uses_side_stream_) {
    transfer_ends_.resize(program_.instructions.size());
    predecessor_events_.resize(program_.instructions.size());
  }
}

Execution::~Execution() {
  if (transfers_on_host_) return;
  try {
    if (num_under_way_ > 0) {  // the run has failed
      const SideStreamGuard side(device_, SideStream::kTransfers);
      for (std::vector<WorkPtr>& works : works_) {
        for (WorkPtr& work : works) {
          if (work) work->wait();
        }
      }
      const StreamEvent end = side.record();
      end.block(*home_stream_);
      if (is_completing_) end.block(side_stream(device_, SideStream::kCompletion));  // may own buffers
    }
  } catch (const std::exception&) {
    // The group has failed, and its error was reported already. A destructor must not throw.
  }
  abandon();
}

void Execution::write_to(const at::Tensor& out) {
  outputs_[0] = out;
  buffers_[program_.outputs[0].buffer] = flat_view(is_on_cpu_ ? out : on_arena(out), 0, out.numel());
}

const at::Tensor& Execution::output(size_t index) {
  // No instruction writes an output without elements.
  if (!outputs_[index].defined()) allocate(program_.outputs[index].buffer);
  return outputs_[index];
}

void Execution::copy_input(const at::Tensor& input) {
  if (!buffers_[kInputBuffer].is_alias_of(input)) return;  // the constructor has copied it to make it row-major
  const BelowAutograd guard;
  at::Tensor copy = allocate_staging(input.numel(), buffers_[kInputBuffer].options());
  copy.copy_(buffers_[kInputBuffer]);
  buffers_[kInputBuffer] = std::move(copy);
  has_staged_input_ = true;
}

void Execution::run_until(int instruction) {
  const BelowAutograd guard;
  const c10::OptionalDeviceGuard on_device(is_on_cpu_ ? std::nullopt : std::optional(device_));
  // Not recorded in the constructor: there the home stream does not wait yet for transfers of earlier programs
  // (issue_order.h).
  if (uses_side_stream_ && !begin_event_) begin_event_.emplace(*home_stream_);
  StepRange step_range;
  // The lock is held to the end of a step, because passing it to another thread takes longer than a small copy.
  while (next_ < instruction) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    while (next_ < instruction) {
      step_range.at(program_, next_);
      run_instruction();
      if (ends_step(next_ - 1)) break;
    }
  }
}

void Execution::run_next() { run_until(std::min(next_ + 1, num_instructions_)); }

void Execution::start_all_transfers() { run_until(compiled_.last_communication() + 1); }

void Execution::finish() { finish_until(num_instructions_); }

void Execution::finish_until(int instruction) {
  run_until(instruction);
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void Execution::release() {
  // Tensors and groups are freed after the lock is released, because freeing may need the GIL or wait for threads.
  std::vector<at::Tensor> buffers;
  c10::SmallVector<at::Tensor, 2> outputs;
  c10::SmallVector<GroupLease, 4> groups;
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (has_staged_input_ && !failure_) return_staging(buffers_[kInputBuffer]);
  has_staged_input_ = false;
  buffers.swap(buffers_);
  outputs.swap(outputs_);
  begin_event_.reset();
  predecessor_events_.clear();
  transfer_ends_.clear();
  groups.swap(groups_);
}

void Execution::submit_completion() {
  for (const at::Tensor& buffer : buffers_) {
    if (buffer.defined()) home_buffers_.push_back(buffer);
  }
  {
    const SideStreamGuard side(device_, SideStream::kCompletion);
    is_completing_ = true;
    run_until(num_instructions_);
    end_event_.emplace(side.record());
    started_in_capture_ = is_capturing(device_);
  }
  release();
}

void Execution::wait_for_end() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  check_capture();
  wait_for(*end_event_, device_);
  is_waited_for_ = true;
  record_uses_on_current_stream();
  home_buffers_.clear();
}

void Execution::record_uses_on_current_stream() const {
  const c10::Stream current = current_stream(device_);
  if (current == *home_stream_) return;
  for (const at::Tensor& buffer : home_buffers_) record_use(buffer, current);
}

void Execution::check_capture() const {
  const bool captures = is_capturing(device_);
  TORCH_CHECK(captures == started_in_capture_, "shardwright: rank ", compiled_.rank(),
              captures
                  ? " waits in a graph capture for a redistribute that was started before the capture. Wait for it "
                    "before the capture begins"
                  : " waits after a graph capture for a redistribute that was started in the capture. Wait for it "
                    "before the capture ends",
              " (", compiled_.origin().text(), ")");
}

void Execution::wait_until(int instruction) {
  if (!is_completing_) {
    finish_until(instruction);
    // The progress thread may keep a finished run for a while; the run must not keep its tensors.
    if (finished()) release();
    return;
  }
  if (instruction >= num_instructions_) return wait_for_end();
  if (instruction == 0) return;
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  check_capture();
  wait_for(step_ends_.lower_bound(instruction)->second, device_);
  record_uses_on_current_stream();
}

bool Execution::is_done() const {
  if (!is_completing_) return finished();
  return !end_event_ || end_event_->query();
}

// A step also ends before each of its Waits, because a caller may wait for the reads of sources, which come before the
// first Wait.
bool Execution::ends_step(int instruction) const {
  if (instruction + 1 == num_instructions_) return true;
  const Instruction& next = program_.instructions[instruction + 1];
  return next.step != program_.instructions[instruction].step || std::holds_alternative<Wait>(next.operation);
}

void Execution::abandon() noexcept {
  try {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    // The allocator reuses a buffer once both streams are done with it.
    for (const at::Tensor& buffer : home_buffers_) {
      record_use(buffer, side_stream(device_, SideStream::kTransfers));
      record_use(buffer, side_stream(device_, SideStream::kCompletion));
    }
    home_buffers_.clear();
  } catch (const std::exception&) {
    // The device has failed; there is nothing left to protect.
  }
}

void Execution::run_instruction() {
  const int index = next_;
  try {
    for (const BufferId b : compiled_.lifetimes().begins[index]) allocate(b);
    execute(program_.instructions[index].operation, index);
    if (uses_side_stream_ && compiled_.is_predecessor(index))
      predecessor_events_[index].emplace(current_stream(device_));
    if (is_completing_ && program_.num_destinations() > 0 && ends_step(index)) {
      step_ends_.emplace(index + 1, current_stream(device_));
    }
  } catch (const c10::Error& error) {
    fail(index, error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(index, error.what());
  }
  for (const BufferId b : compiled_.lifetimes().ends[index]) {
    if (!program_.is_input(b) && !program_.is_output(b)) return_staging(buffers_[b]);
    buffers_[b].reset();
  }
  next_ = index + 1;
}

void Execution::fail(int index, const std::string& reason) {
  const Instruction& instruction = program_.instructions[index];
  const std::string text =
      concat("shardwright: rank ", compiled_.rank(), " failed in ", program_.step_texts[instruction.step],
             group_text(index), " of plan\n", compiled_.origin().text(), "\n", reason);
  failure_ = std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, text));
  has_failed_ = true;
  next_ = num_instructions_;  // no later instruction runs
  std::rethrow_exception(failure_);
}

std::string Execution::group_text(int index) const {
  const std::optional<int> group = group_of(program_.operation_in_effect(program_.instructions[index].operation));
  return group ? concat(" in the group of ranks (", join(program_.groups[*group].ranks), ")") : "";
}

void Execution::allocate(BufferId buffer) {
  if (buffer == compiled_.flagged_result()) return;  // the product allocates its result
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (program_.outputs[i].buffer != buffer) continue;
    if (outputs_[i].defined()) return;
    if (program_.is_input(buffer)) {
      outputs_[i] = buffers_[buffer].view(program_.outputs[i].shape);
      return;
    }
    outputs_[i] = at::empty(program_.outputs[i].shape, compiled_.options_of(buffer, options_));
    prefer_huge_pages(outputs_[i]);
    buffers_[buffer] = flat_view(outputs_[i], 0, outputs_[i].numel());
    return;
  }
  const at::TensorOptions options = compiled_.options_of(buffer, options_);
  buffers_[buffer] = allocate_staging(program_.buffers[buffer].count,
                                      program_.buffers[buffer].is_on_host ? options.device(at::kCPU) : options);
}

// A range that covers a buffer is the buffer itself, because making a view takes time.
at::Tensor Execution::range(const BufferRange& range) const {
  const at::Tensor& buffer = buffers_[range.buffer];
  const bool is_whole = range.offset == 0 && range.count == program_.buffers[range.buffer].count;
  return is_whole ? buffer : flat_view(buffer, range.offset, range.count);
}

char* Execution::address(const BufferRange& range) const {
  const at::Tensor& buffer = buffers_[range.buffer];
  return static_cast<char*>(buffer.data_ptr()) + range.offset * static_cast<int64_t>(buffer.element_size());
}

void Execution::reduce(const Reduce& reduce) {
  if (is_on_cpu_) {
    std::vector<const void*> parts;
    parts.reserve(reduce.parts.size());
    for (const BufferRange& part : reduce.parts) parts.push_back(address(part));
    return reduce_parts(reduce.op, parts, reduce.dst.count, reduce.divisor, address(reduce.dst),
                        c10::typeMetaToScalarType(options_.dtype()));
  }
  at::Tensor dst = range(reduce.dst);
  std::vector<at::Tensor> parts;
  for (const BufferRange& part : reduce.parts) parts.push_back(range(part));
  reduce_parts(reduce.op, parts, reduce.divisor, dst);
}

GemmHints Execution::gemm_hints() const {
  GemmHints hints;
  hints.fast_accumulation = fast_accumulation();
  if (num_under_way_ > 0) hints.sms_left = sm_carveout() > 0 ? sm_carveout() : static_cast<int>(program_.sms_left);
  return hints;
}

bool Execution::is_traced() const { return is_tracing() && !is_capturing(device_); }

int64_t Execution::run_number() {
  if (run_number_ == 0) run_number_ = next_run_number();
  return run_number_;
}

void Execution::execute(const Operation& operation, int index) {
  if (const auto* o = std::get_if<Wait>(&operation)) return wait(o->ticket);
  if (is_communication(operation)) return start_transfer(operation, index);
  if (!is_traced()) return compute(operation, index);
  const Instruction& instruction = program_.instructions[index];
  std::string text = to_string(operation);
  if (std::holds_alternative<Gemm>(operation) && gemm_hints().sms_left > 0) {
    text += concat(", ", gemm_hints().sms_left, " SMs left to transfers");
  }
  TraceSpan span("compute", std::move(text), instruction.chunk, run_number());
  if (!is_on_cpu_) span.start_at(record_event(device_, true));
  compute(operation, index);
  is_on_cpu_ ? span.stop() : span.stop_at(record_event(device_, true));
}

// Compares addresses, not storages: all views of an arena have the same storage, wherever they are in it.
bool Execution::is_input_in_place(BufferId dst) const {
  const std::optional<int64_t> offset = compiled_.offset_of_input();
  const at::Tensor& input = buffers_[kInputBuffer];
  if (!offset || input.numel() == 0) return false;
  const auto* begin = static_cast<const char*>(buffers_[dst].const_data_ptr());
  return input.const_data_ptr() == begin + *offset * static_cast<int64_t>(input.element_size());
}

// Divides a range in place. Of integers, it divides the whole first output instead, and replaces the output by a new
// floating-point tensor.
void Execution::divide(const Divide& divide) {
  if (program_.dtype.has_fractions()) {
    range(divide.dst).div_(divide.divisor);
  } else {
    // R -> P(sum) of integers: PyTorch's division makes them floating-point.
    outputs_[0] = at::div(outputs_[0], static_cast<int64_t>(divide.divisor));
    buffers_[divide.dst.buffer] = flat_view(outputs_[0], 0, outputs_[0].numel());
  }
}

at::Tensor Execution::buffer_as(BufferId buffer, DType dtype) const {
  const at::Tensor& tensor = buffers_[buffer];
  return dtype == program_.dtype_of(buffer) ? tensor : flat_elements(tensor, scalar_type_of(dtype));
}

// A copy on CPU needs no dtypes: it moves bytes.
void Execution::copy(const Copy& copy, int index) {
  if (copy.src == kInputBuffer && is_input_in_place(copy.dst)) return;
  const StridedCopy* prepared = compiled_.strided_copy(index);
  if (copy.divisor != 1) return run_divided(*prepared, copy.divisor, buffers_[copy.src], buffers_[copy.dst]);
  if (prepared != nullptr && is_on_cpu_) return run(*prepared, buffers_[copy.src], buffers_[copy.dst]);
  const at::Tensor src = buffer_as(copy.src, program_.src_dtype(copy));
  at::Tensor dst = buffer_as(copy.dst, program_.dst_dtype(copy));
  prepared != nullptr ? run(*prepared, src, dst) : copy_with_aten(copy.boxes, src, dst);
}

void Execution::multiply(const Gemm& gemm, int index) {
  if (gemm.flags) return multiply_flagged(gemm, index);
  const at::Tensor& lhs = buffers_[gemm.lhs.buffer];
  const at::Tensor& rhs = buffers_[gemm.rhs.buffer];
  at::Tensor& dst = buffers_[gemm.dst.buffer];
  if (gemm.lhs_scale) {
    multiply_scaled(gemm, lhs, rhs, buffers_[gemm.lhs_scale->buffer], buffers_[gemm.rhs_scale->buffer], dst,
                    gemm_hints());
  } else {
    const at::Tensor none;
    shardwright::multiply(gemm, lhs, rhs, dst, gemm.bias ? buffers_[gemm.bias->buffer] : none, gemm_hints());
  }
}

void Execution::compute(const Operation& operation, int index) {
  match(
      operation, [&](const Copy& o) { copy(o, index); }, [&](const FillZero& o) { range(o.dst).zero_(); },
      [&](const Divide& o) { divide(o); },
      [&](const Power& o) {
        at::Tensor dst = range(o.dst);
        at::pow_out(dst, range(o.src), o.exponent);
      },
      [&](const Cast& o) { range(o.dst).copy_(range(o.src)); }, [&](const Gemm& o) { multiply(o, index); },
      [&](const Attend& o) { attend(o, buffers_); }, [&](const AttendBackward& o) { attend_backward(o, buffers_); },
      [&](const Merge& o) { merge(o, buffers_); }, [&](const Accumulate& o) { accumulate(o, buffers_); },
      [&](const Reduce& o) { reduce(o); },
      [](const IsTransfer auto&) { check_invariant(false, "a transfer is run as an instruction that computes"); },
      [](const Wait&) { check_invariant(false, "a Wait is run as an instruction that computes"); });
}

}  // namespace shardwright
