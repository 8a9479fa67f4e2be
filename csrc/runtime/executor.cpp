#include "runtime/executor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/div.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <deque>

#include "moves/describe.h"
#include "moves/traffic.h"
#include "planning/serialize.h"
#include "program/order.h"
#include "runtime/communicators.h"
#include "runtime/execution.h"
#include "runtime/progress.h"
#include "runtime/record.h"
#include "runtime/side_stream.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Of what programs have beside their own dtype: results, sums, operands and scales of products.
at::ScalarType scalar_type_of(const DType& dtype) {
  static const std::unordered_map<std::string, at::ScalarType> types{
      {"float32", at::kFloat}, {"float64", at::kDouble},          {"bfloat16", at::kBFloat16},
      {"float16", at::kHalf},  {"float8_e5m2", at::kFloat8_e5m2}, {"float8_e4m3fn", at::kFloat8_e4m3fn}};
  const auto found = types.find(dtype.name());
  check_invariant(found != types.end(), dtype.name(), " as a dtype of its own in a program");
  return found->second;
}

// The issue lane: programs in the order they were started.
class Lane {
 public:
  // Starts `execution` behind all communications of the programs before it.
  template <typename Advance>
  void issue(const std::shared_ptr<Execution>& execution, const Advance& advance) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    drain();
    advance(*execution);
    if (!execution->all_started()) pending_.push_back(execution);
  }

  void drain() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    while (!pending_.empty()) {
      const std::shared_ptr<Execution> execution = pending_.front().lock();
      pending_.pop_front();
      if (execution) execution->start_all();
    }
  }

  // Where the device has streams: a program that goes on beside its caller's stream, whose result is `output`.
  void note_beside(const std::shared_ptr<Execution>& execution, const at::Tensor& output) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    std::erase_if(beside_, [](const Beside& one) {
      const std::shared_ptr<Execution> known = one.execution.lock();
      if (!known || known->is_waited_for()) return true;
      if (one.output.use_count() > 0) return false;
      known->abandon();  // a Work that nobody waits for is never let go of by c10d
      return true;
    });
    beside_.push_back({execution, c10::weak_intrusive_ptr<c10::TensorImpl>(output.getIntrusivePtr())});
  }

  // Makes the current stream wait for the last of these, and so for all, unless somebody has waited for it.
  void stand_behind_those_beside() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (beside_.empty()) return;
    const std::shared_ptr<Execution> last = beside_.back().execution.lock();
    if (last && !last->is_waited_for()) last->order_before_current();
  }

 private:
  struct Beside {
    std::weak_ptr<Execution> execution;
    c10::weak_intrusive_ptr<c10::TensorImpl> output;
  };

  std::recursive_mutex mutex_;
  std::deque<std::weak_ptr<Execution>> pending_;  // with communications left to start
  std::vector<Beside> beside_;
};

// One per device.
constexpr int kMaxLanes = 1 + 128;  // device indices are of 8 bits

std::array<Lane, kMaxLanes>& lanes() {
  static auto* instance = new std::array<Lane, kMaxLanes>;  // outlives threads that run at exit
  return *instance;
}

Lane& lane_of(const at::Device& device) { return lanes().at(device.is_cpu() ? 0 : 1 + device.index()); }

// What AsyncCollectiveTensor waits for: the end of the program.
class ExecutionWork : public c10d::Work {
 public:
  ExecutionWork(std::shared_ptr<Execution> execution, const at::Tensor& output)
      : execution_(std::move(execution)), output_(output.getIntrusivePtr()) {}
  ~ExecutionWork() override {
    if (!was_waited_for_ && execution_->failed()) {
      TORCH_WARN("shardwright: an asynchronous redistribute that nobody waited for has failed");
    }
  }

  bool isCompleted() override { return is_on_cpu() ? execution_->finished() : execution_->is_done(); }
  bool isSuccess() const override { return execution_->finished() && !execution_->failed(); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    was_waited_for_ = true;
    is_on_cpu() ? execution_->finish() : execution_->wait_for_end();
  }
  // The output, if anybody still holds it.
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

at::Tensor copied_to(const at::Tensor& tensor, at::Device device) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return tensor.to(device);
}

Communication communication_of(const Step& step) {
  Communication found;
  found.op = step_op_name(step.op);
  found.mesh_dims = step.mesh_dims.to_vector();
  found.group_size = step.before.mesh().group_size(step.mesh_dims);
  for (const int d : found.mesh_dims) {
    const Placement& before = step.before.placements()[d];
    const Placement& after = step.after.placements()[d];
    if (before.is_partial()) found.reduce_op = reduce_op_name(before.op);
    if (before.is_shard_like()) found.gather_dim = before.dim;
    if (after.is_shard_like()) found.shard_dim = after.dim;
  }
  return found;
}

std::vector<std::pair<std::string, std::string>> signature_of(const Plan& plan, const std::string& plan_bytes) {
  std::vector<std::string> steps;
  for (const Step& step : plan.steps) {
    steps.push_back(concat(step_op_name(step.op), " over ", plan.src.mesh().names_of(step.mesh_dims)));
  }
  // Whatever else there is in a plan, its topology for one, is in its bytes.
  const size_t bytes = std::hash<std::string>()(plan_bytes);
  return {{"tensor", concat(plan.src.dtype().name(), "[", join(plan.src.shape()), "]")},
          {"dtype", plan.src.dtype().name()},
          {"mesh", plan.src.mesh().to_string()},
          {"src", plan.src.placements_string()},
          {"dst", plan.dst.placements_string()},
          {"backend", backend_name(plan.backend)},
          {"objective", objective_name(plan.objective)},
          {"topology", plan.topology.name},
          {"steps", steps.empty() ? "none" : join(steps)},
          {"plan bytes", concat(plan_bytes.size(), " with hash ", bytes)}};
}

}  // namespace

void drain_lanes() {
  for (Lane& lane : lanes()) lane.drain();
}

Counters& counters() {
  static Counters instance;
  return instance;
}

Executable::Executable(const std::string& plan_bytes, int64_t rank) : rank_(rank) {
  const Plan plan = from_bytes(plan_bytes);
  const auto position = plan.src.mesh().position_of(rank);
  check_user(position.has_value(), "rank: ", rank, " is not on the mesh (", plan.src.mesh().to_string(), ")");
  program_ = compile(plan, *position);
  text_ = to_string(plan);
  signature_ = signature_of(plan, plan_bytes);
  describe({&plan}, "redistribute");
}

Executable::Executable(Program program, const std::vector<const Plan*>& plans, std::string text, Signature signature,
                       int64_t rank)
    : program_(std::move(program)), text_(std::move(text)), signature_(std::move(signature)), rank_(rank) {
  describe(plans, "matmul");
}

void Executable::describe(const std::vector<const Plan*>& plans, const char* title) {
  const Mesh& mesh = plans.front()->src.mesh();
  backend_ = plans.front()->backend;
  lifetimes_ = program_.lifetimes();
  is_asked_for_.resize(program_.instructions.size(), false);
  if (backend_ == Backend::kNccl) order_of_transfers_ = order_of_transfers(program_);  // Gloo's run on the host
  for (const int instruction : order_of_transfers_) {
    if (instruction >= 0) is_asked_for_[instruction] = true;
  }
  for (int64_t p = 0; p < mesh.size(); ++p) mesh_ranks_.push_back(mesh.rank_at(p));
  for (const Plan* plan : plans) {
    for (const Step& step : plan->steps) {
      received_bytes_ += traffic_at(step, plan->backend, *mesh.position_of(rank_)).received_bytes;
      if (!is_local(step.op)) communications_.push_back(communication_of(step));
    }
  }
  title_ = concat("shardwright::", title, " ", plans.front()->src.placements_string(), " -> ",
                  plans.front()->dst.placements_string(), ", ", received_bytes_, " bytes received");
  for (const auto& [buffer, dtype] : program_.other_dtypes) other_dtypes_.emplace(buffer, scalar_type_of(dtype));
  for (int i = static_cast<int>(program_.input_shapes.size()) - 1; i >= 0; --i) {
    if (!other_dtypes_.contains(i)) usual_input_ = i;
  }
  for (size_t i = 0; i < program_.instructions.size(); ++i) {
    if (const auto* copy = std::get_if<Copy>(&program_.instructions[i].operation)) {
      copies_.emplace(static_cast<int>(i), StridedCopy(copy->boxes, program_.dtype_of(copy->src).size_bytes()));
    }
    if (is_communication(program_.instructions[i].operation)) last_communication_ = static_cast<int>(i);
  }
  communicates_ = last_communication_ >= 0;
  note_input_reads();
  const DTypeKind kind = program_.dtype.kind();
  travels_as_bytes_ = kind == DTypeKind::kOpaque || kind == DTypeKind::kComplex || program_.dtype.name() == "int16";
}

void Executable::note_input_reads() {
  const std::vector<Instruction>& instructions = program_.instructions;
  const auto is_wait = [](const Instruction& i) { return std::holds_alternative<Wait>(i.operation); };
  first_wait_ =
      static_cast<int>(std::find_if(instructions.begin(), instructions.end(), is_wait) - instructions.begin());
  for (int i = 0; i < static_cast<int>(instructions.size()); ++i) {
    const Operation& operation = instructions[i].operation;
    const bool is_exchange =
        std::holds_alternative<AllToAll>(operation) || std::holds_alternative<SendReceive>(operation);
    if (is_communication(operation) && !is_exchange) end_of_collectives_ = i + 1;
    const std::vector<int> buffers = buffers_of(operation);
    if (std::none_of(buffers.begin(), buffers.end(), [&](int b) { return program_.is_input(b); })) continue;
    if (is_communication(operation) || i > first_wait_) reads_input_after_start_ = true;
    if (!is_communication(operation) || i > first_wait_) end_of_input_reads_ = i + 1;
  }
}

void Executable::bind(const std::vector<comm::GroupPtr>& groups) {
  check_user(groups.size() == program_.groups.size(), "groups: got ", groups.size(), ", the program needs ",
             program_.groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    const Group& expected = program_.groups[g];
    check_user(groups[g]->getSize() == static_cast<int>(expected.ranks.size()) &&
                   groups[g]->getRank() == static_cast<int>(expected.index),
               "groups: group ", g, " has ", groups[g]->getSize(), " ranks and this is its rank ", groups[g]->getRank(),
               "; the program needs ranks (", join(expected.ranks), ") in this order");
  }
  groups_.assign(groups.begin(), groups.end());
}

bool Executable::is_bound_to(const std::vector<comm::GroupPtr>& groups) const {
  return std::equal(groups_.begin(), groups_.end(), groups.begin(), groups.end(),
                    [](const comm::WeakGroupPtr& bound, const comm::GroupPtr& group) { return bound.lock() == group; });
}

c10::SmallVector<comm::GroupPtr, 4> Executable::groups() const {
  c10::SmallVector<comm::GroupPtr, 4> alive;
  for (size_t g = 0; g < groups_.size(); ++g) {
    alive.push_back(groups_[g].lock());
    check_user(alive.back().defined(), "group: the process group of ranks (", join(program_.groups[g].ranks),
               ") was destroyed, and a redistribute still needs it (", text_, ")");
  }
  return alive;
}

at::TensorOptions Executable::options_like(c10::ArrayRef<at::Tensor> inputs) const {
  const bool is_usual = usual_input_ >= 0;
  const at::TensorOptions options =
      inputs[is_usual ? usual_input_ : 0].options().requires_grad(false).memory_format(std::nullopt);
  return is_usual ? options : options.dtype(scalar_type_of(program_.dtype));
}

at::TensorOptions Executable::options_of(int buffer, const at::TensorOptions& usual) const {
  if (other_dtypes_.empty()) return usual;
  const auto other = other_dtypes_.find(buffer);
  return other == other_dtypes_.end() ? usual : usual.dtype(other->second);
}

void check_strided(const at::Tensor& given, const std::string& argument) {
  TORCH_CHECK_VALUE(given.defined(), argument, ": got no tensor");
  TORCH_CHECK_VALUE(!given.is_nested(), argument, ": is a nested tensor; allowed are plain ones");
  TORCH_CHECK_VALUE(given.layout() == at::kStrided, argument, ": has layout ", given.layout(),
                    "; allowed are strided tensors (.to_dense() makes them)");
}

void Executable::check_inputs(c10::ArrayRef<at::Tensor> inputs) const {
  const auto name = [](const at::Tensor& t) { return c10::toString(t.scalar_type()); };
  TORCH_CHECK_VALUE(inputs.size() == program_.input_shapes.size(), "inputs: got ", inputs.size(),
                    ", the program takes ", program_.input_shapes.size(), " (", text_, ")");
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& input = inputs[i];
    const auto which = [&] { return inputs.size() == 1 ? std::string("local tensor") : concat("input ", i); };
    TORCH_CHECK_VALUE(!input.key_set().has(c10::DispatchKey::Python), which(),
                      ": is a tensor subclass; allowed is a plain tensor");
    if (input.layout() != at::kStrided || input.is_nested()) check_strided(input, which());
    TORCH_CHECK_VALUE(input.sizes().equals(program_.input_shapes[i]), which(), ": has shape ", input.sizes(),
                      " on rank ", rank_, ", where the layout has ", c10::IntArrayRef(program_.input_shapes[i]), " (",
                      text_, ")");
    const auto other = other_dtypes_.find(static_cast<int>(i));
    const bool has_dtype = other != other_dtypes_.end()
                               ? input.scalar_type() == other->second
                               : static_cast<int64_t>(input.element_size()) == program_.dtype.size_bytes() &&
                                     input.scalar_type() == inputs[usual_input_].scalar_type();
    TORCH_CHECK_VALUE(has_dtype, which(), ": has dtype ", name(input), " where the layout has ",
                      program_.dtype_of(static_cast<int>(i)).name());
    TORCH_CHECK_VALUE(input.device() == inputs[0].device(), which(), ": is on ", input.device(),
                      ", the first input on ", inputs[0].device());
  }
  TORCH_CHECK_VALUE(groups_.size() == program_.groups.size(), "the program was not bound to its process groups");
}

// As PyTorch slices: a clone of the box, in the memory order of the input, divided once per mesh dim.
at::Tensor Executable::take_box(const at::Tensor& input) const {
  const c10::NoGradGuard no_grad;
  at::Tensor box = input.detach();
  for (size_t t = 0; t < program_.outputs[0].shape.size(); ++t) {
    box = box.narrow(static_cast<int64_t>(t), (*program_.box_of_input)[t], program_.outputs[0].shape[t]);
  }
  bool divided = false;
  for (const Instruction& instruction : program_.instructions) {
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

void Executable::make_communicators(const at::Device& device) const {
  if (device.is_cpu() || ready_device_ == device.index()) return;
  shardwright::make_communicators(groups(), device);
  if (!is_capturing(device)) ready_device_ = device.index();
}

bool Executable::goes_through_host(const at::Device& device) const {
  return backend_ == Backend::kGloo && !device.is_cpu() && !groups_.empty();
}

void Executable::count_way_through_host(const at::Device& device) const {
  ++counters().through_host;
  TORCH_WARN_ONCE("shardwright: tensors on ", device,
                  " are copied to host memory, redistributed there and copied back, ",
                  "because their process groups are Gloo's; sw.stats()['through_host'] counts them");
}

at::Tensor Executable::run(const at::Tensor& input) const {
  const Record record(title_);
  check_inputs(input);
  if (returns_input()) return input;
  if (goes_through_host(input.device())) {
    count_way_through_host(input.device());
    return copied_to(run(copied_to(input, at::kCPU)), input.device());
  }
  make_communicators(input.device());
  if (program_.box_of_input && !input.is_contiguous()) {
    ++counters().runs;
    return take_box(input);
  }
  return complete(std::make_shared<Execution>(shared_from_this(), input, /*is_beside_compute=*/false));
}

void Executable::run_into(const at::Tensor& input, const at::Tensor& out) const {
  const Record record(title_);
  check_inputs(input);
  check_strided(out, "out");
  TORCH_CHECK_VALUE(out.sizes().equals(program_.outputs[0].shape) && out.is_contiguous(), "out: has shape ",
                    out.sizes(), " and strides ", out.strides(), " on rank ", rank_,
                    "; allowed is a contiguous tensor of shape ", c10::IntArrayRef(program_.outputs[0].shape));
  TORCH_CHECK_VALUE(out.scalar_type() == input.scalar_type() && out.device() == input.device(), "out: is ",
                    c10::toString(out.scalar_type()), " on ", out.device(), "; allowed is what the input is, ",
                    c10::toString(input.scalar_type()), " on ", input.device());
  TORCH_CHECK_VALUE(!out.is_alias_of(input), "out: shares memory with the input; allowed is memory of its own");
  if (returns_input()) {
    out.copy_(input);
    ++counters().runs;
    return;
  }
  if (goes_through_host(input.device())) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor(out).copy_(run(input));
    return;
  }
  make_communicators(input.device());
  const auto execution = std::make_shared<Execution>(shared_from_this(), input, /*is_beside_compute=*/false);
  execution->write_to(out);
  complete(execution);
}

at::Tensor Executable::complete(const std::shared_ptr<Execution>& execution) const {
  if (communicates_) {
    Lane& lane = lane_of(execution->device());
    if (!execution->device().is_cpu()) lane.stand_behind_those_beside();
    lane.issue(execution, [](Execution& e) { e.start_all(); });
    counters().received_bytes += received_bytes_;
  }
  execution->finish();
  ++counters().runs;
  return execution->output();
}

std::vector<at::Tensor> Executable::run_all(c10::ArrayRef<at::Tensor> inputs) const {
  const Record record(title_);
  check_inputs(inputs);
  const at::Device device = inputs[0].device();
  if (goes_through_host(device)) {
    count_way_through_host(device);
    std::vector<at::Tensor> on_host;
    for (const at::Tensor& input : inputs) on_host.push_back(copied_to(input, at::kCPU));
    std::vector<at::Tensor> outputs = run_all(on_host);
    for (at::Tensor& output : outputs) output = copied_to(output, device);
    return outputs;
  }
  make_communicators(device);
  const auto execution = std::make_shared<Execution>(shared_from_this(), inputs, /*is_beside_compute=*/true);
  complete(execution);
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < program_.outputs.size(); ++i) outputs.push_back(execution->output(i));
  return outputs;
}

std::pair<at::Tensor, comm::WorkPtr> Executable::start(const at::Tensor& input, bool input_may_change) const {
  const Record record(title_);
  if (returns_input() || communications_.empty()) return {run(input), nullptr};
  check_inputs(input);
  // Where others communicate and this rank does not, there is something to wait for all the same on devices with
  // streams: who waits on another stream must find the result there.
  const bool is_done_at_once = input.device().is_cpu() && !communicates_;
  if (is_done_at_once || goes_through_host(input.device())) return {run(input), nullptr};
  make_communicators(input.device());
  const auto execution = std::make_shared<Execution>(shared_from_this(), input, /*is_beside_compute=*/true);
  const at::Tensor output = execution->output();  // before anything runs, so that it is the one waited for
  execution->device().is_cpu() ? start_on_cpu(execution, input, input_may_change)
                               : start_on_streams(execution, output, input_may_change);
  ++counters().runs;
  counters().received_bytes += received_bytes_;
  return {output, c10::make_intrusive<ExecutionWork>(execution, output)};
}

void Executable::start_on_cpu(const std::shared_ptr<Execution>& execution, const at::Tensor& input,
                              bool input_may_change) const {
  if (input_may_change && reads_input_after_start_) execution->copy_input(input);
  // What watches this thread is to see all communications.
  const bool is_watched = c10::impl::TorchDispatchModeTLS::any_modes_set();
  const int until = is_watched ? last_communication_ + 1 : std::max(first_wait_, end_of_collectives_);
  execution->exchange_by_messages();
  lane_of(execution->device()).issue(execution, [until](Execution& e) { e.start_until(until); });
  finish_on_progress_thread(execution);
}

void Executable::start_on_streams(const std::shared_ptr<Execution>& execution, const at::Tensor& output,
                                  bool input_may_change) const {
  const int until = input_may_change ? std::max(first_wait_, end_of_input_reads_) : first_wait_;
  Lane& lane = lane_of(execution->device());
  lane.issue(execution, [&](Execution& e) {
    e.start_until(until);
    e.start_rest_beside();
    lane.note_beside(execution, output);
  });
}

}  // namespace shardwright
