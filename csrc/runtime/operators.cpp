#include "runtime/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "moves/describe.h"
#include "planning/serialize.h"
#include "products/compile.h"
#include "products/serialize.h"
#include "runtime/c10d/process_groups.h"
#include "runtime/executor.h"
#include "support/bounded_cache.h"
#include "support/error.h"
#include "support/text.h"
#include "support/wire_format.h"

namespace shardwright {
namespace {

constexpr size_t kMaxExecutables = 8192;

// Operators never return what they were given.
at::Tensor fresh(const at::Tensor& output, const at::Tensor& input) {
  return output.is_alias_of(input) ? output.clone(at::MemoryFormat::Contiguous) : output;
}

at::Tensor row_major(const at::Tensor& input, const std::string& argument) {
  check_strided(input, argument);
  return input.contiguous();
}

at::Tensor redistribute(const at::Tensor& input, const std::string& plan, const std::vector<std::string>& groups,
                        int64_t rank, const std::string& /*backward_plan*/,
                        const std::vector<std::string>& /*backward_groups*/) {
  return fresh(run(executable_of(plan, groups, rank), row_major(input, "input")), input);
}

void redistribute_out(const at::Tensor& input, const std::string& plan, const std::vector<std::string>& groups,
                      int64_t rank, at::Tensor& out) {
  {
    const at::AutoDispatchBelowADInplaceOrView guard;  // or a copy in there would count as a write of its own
    run_into(executable_of(plan, groups, rank), row_major(input, "input"), out);
  }
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
}

// What was started and not waited for, by number. The number travels through a graph as the value of a tensor, so that
// it does not matter what a compiler does with that tensor.
class UnderWay {
 public:
  struct Transfer {
    at::Tensor input;
    at::Tensor output;
    WorkPtr work;  // null where nothing is left to do
  };

  int64_t add(Transfer transfer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    transfers_.emplace(next_, std::move(transfer));
    return next_++;
  }

  Transfer take(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = transfers_.find(number);
    TORCH_CHECK_VALUE(found != transfers_.end(), "handle: ", number,
                      " is no redistribute under way; each is to be waited for once, in the process that started it");
    Transfer transfer = std::move(found->second);
    transfers_.erase(found);
    return transfer;
  }

 private:
  std::mutex mutex_;
  int64_t next_ = 1;
  std::unordered_map<int64_t, Transfer> transfers_;
};

UnderWay& under_way() {
  static UnderWay* instance = new UnderWay;  // outlives threads that run at exit
  return *instance;
}

// A plan for other sizes than its own, and the names of the groups it needs, as one list.
using PlanForSizes = std::vector<std::string>(const std::string&, const std::vector<std::string>&, int64_t,
                                              c10::IntArrayRef);

// Changes with every change of the tables that plans are made by.
std::atomic<int64_t> tables_number{0};

std::string key_of(const std::string& text, const std::vector<std::string>& groups, int64_t rank) {
  std::string key = text;
  for (const std::string& name : groups) key += '\n' + name;
  return key += '\n' + std::to_string(rank);
}

// Kept by value: planning is done in Python, which has the tables.
std::vector<std::string> plan_for_sizes(const std::string& plan, const std::vector<std::string>& groups, int64_t rank,
                                        c10::IntArrayRef sizes) {
  static auto* kept = new BoundedCache<std::string, std::vector<std::string>>(kMaxExecutables);
  // Tables are read before the plan is made: what is made while they change is not found again.
  std::string key = key_of(plan, groups, rank);
  key += '\n' + std::to_string(tables_number);
  for (const int64_t size : sizes) key += ' ' + std::to_string(size);
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("shardwright::plan_for_sizes", "").typed<PlanForSizes>();
  return kept->get_or_make(key, [&] { return handle.call(plan, groups, rank, sizes); });
}

ExecutablePtr executable_for_sizes(const std::string& plan, const std::vector<std::string>& groups, int64_t rank,
                                   at::OptionalIntArrayRef sizes) {
  if (!sizes.has_value()) return executable_of(plan, groups, rank);
  std::vector<std::string> names = plan_for_sizes(plan, groups, rank, *sizes);
  const std::string text = std::move(names.front());
  names.erase(names.begin());
  return executable_of(text, names, rank);
}

// `after` only orders: see the schema.
at::Tensor redistribute_start(const at::Tensor& input, const std::string& plan, const std::vector<std::string>& groups,
                              int64_t rank, at::OptionalIntArrayRef sizes, const std::optional<at::Tensor>& /*after*/) {
  const at::Tensor dense = row_major(input, "input");
  auto [output, work] = start(executable_for_sizes(plan, groups, rank, sizes), dense, /*input_may_change=*/false);
  const auto size = static_cast<int64_t>(std::max(dense.nbytes(), output.nbytes())) / 8 + 1;
  at::Tensor handle = at::empty({1}, at::TensorOptions(at::kLong).device(at::kCPU));
  *handle.mutable_data_ptr<int64_t>() = under_way().add({dense, output, std::move(work)});
  return handle.expand({size});
}

// `input` is an argument so that its memory is not used for something else before.
at::Tensor redistribute_wait(const at::Tensor& handle, const at::Tensor& input, const std::string& /*plan*/,
                             int64_t /*rank*/, at::OptionalIntArrayRef /*sizes*/) {
  check_strided(handle, "handle");
  TORCH_CHECK_VALUE(handle.is_cpu() && handle.scalar_type() == at::kLong && handle.numel() > 0, "handle: is ",
                    c10::toString(handle.scalar_type()), " of shape ", handle.sizes(), " on ", handle.device(),
                    "; allowed is what redistribute_start gave");
  const UnderWay::Transfer transfer = under_way().take(*handle.const_data_ptr<int64_t>());
  if (transfer.work) transfer.work->wait();
  return fresh(transfer.output, input);
}

// Products in chunks; inputs and outputs as products/matmul.h lists them.
std::vector<at::Tensor> matmul(const std::vector<at::Tensor>& inputs, const std::string& program,
                               const std::vector<std::string>& groups, int64_t rank) {
  std::vector<at::Tensor> dense;
  for (const at::Tensor& input : inputs) dense.push_back(row_major(input, "inputs"));
  std::vector<at::Tensor> outputs = run_all(executable_of(program, groups, rank), dense);
  for (at::Tensor& output : outputs) {
    for (const at::Tensor& input : inputs) output = fresh(output, input);
  }
  return outputs;
}

class MatmulOrigin : public Origin {
 public:
  explicit MatmulOrigin(std::string matmul_bytes) : matmul_bytes_(std::move(matmul_bytes)) {}

  const char* kind() const override { return "matmul"; }

  std::vector<Plan> plans() const override {
    const auto [matmul, schedule] = matmul_from_bytes(matmul_bytes_);
    std::vector<Plan> plans;
    for (const Plan* plan : plans_of(matmul)) plans.push_back(*plan);
    return plans;
  }

  std::string text() const override {
    const auto [matmul, schedule] = matmul_from_bytes(matmul_bytes_);
    return concat(to_string(plan_of(matmul)), "\nwith products, ", method_name(schedule.method), " in ",
                  count_text(schedule.chunks, "chunk"));
  }

  Signature signature() const override {
    const auto [matmul, schedule] = matmul_from_bytes(matmul_bytes_);
    const Plan& plan = plan_of(matmul);
    return {{"kind", std::holds_alternative<GatherMatmul>(matmul) ? "gather" : "scatter"},
            {"tensor", concat(plan.src.dtype().name(), "[", join(plan.src.shape()), "]")},
            {"dtype", plan.src.dtype().name()},
            {"mesh", plan.src.mesh().to_string()},
            {"src", plan.src.placements_string()},
            {"dst", plan.dst.placements_string()},
            {"method", method_name(schedule.method)},
            {"chunks", chunks_text(schedule)},
            {"program bytes", concat(matmul_bytes_.size(), " with hash ", std::hash<std::string>()(matmul_bytes_))}};
  }

 private:
  std::string matmul_bytes_;
};

std::shared_ptr<const CompiledProgram> compiled_of(const std::string& text, Rank rank) {
  const std::string bytes = bytes_of(text);
  if (!is_matmul(bytes)) return CompiledProgram::from_plan_bytes(bytes, rank);
  const auto [matmul, schedule] = matmul_from_bytes(bytes);
  return std::make_shared<CompiledProgram>(compile(matmul, schedule, rank), plans_of(matmul),
                                           std::make_unique<MatmulOrigin>(bytes), rank);
}

using Redistribute = at::Tensor(const at::Tensor&, const std::string&, const std::vector<std::string>&, int64_t,
                                const std::string&, const std::vector<std::string>&);

const c10::TypedOperatorHandle<Redistribute>& redistribute_handle() {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("shardwright::redistribute", "").typed<Redistribute>();
  return handle;
}

bool is_without_sums(const std::string& text) {
  const Plan plan = from_bytes(bytes_of(text));
  return plan.src.partial_dims().empty() && plan.dst.partial_dims().empty();
}

// The gradient goes the way of backward_plan. That way can be differentiated again where it is the reverse of this one,
// which it is without pending reductions: a gradient stands for P as R.
class RedistributeFunction : public torch::autograd::Function<RedistributeFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input, const std::string& plan,
                            const std::vector<std::string>& groups, int64_t rank, const std::string& backward_plan,
                            const std::vector<std::string>& backward_groups) {
    context->saved_data["plan"] = plan;
    context->saved_data["groups"] = groups;
    context->saved_data["rank"] = rank;
    context->saved_data["backward_plan"] = backward_plan;
    context->saved_data["backward_groups"] = backward_groups;
    const at::AutoDispatchBelowADInplaceOrView guard;
    return redistribute_handle().call(input, plan, groups, rank, backward_plan, backward_groups);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto text = [&](const char* name) { return context->saved_data[name].toStringRef(); };
    const auto names = [&](const char* name) { return context->saved_data[name].to<std::vector<std::string>>(); };
    const std::string backward_plan = text("backward_plan");
    TORCH_CHECK_NOT_IMPLEMENTED(!backward_plan.empty(),
                                "shardwright::redistribute: backward_plan is empty, so there is no gradient; "
                                "shardwright.operator gives one for layouts with S, R, P(sum) and P(avg)");
    const bool is_reversible = at::GradMode::is_enabled() && is_without_sums(text("plan"));
    at::Tensor gradient = redistribute_handle().call(
        gradients[0], backward_plan, names("backward_groups"), context->saved_data["rank"].toInt(),
        is_reversible ? text("plan") : std::string(), is_reversible ? names("groups") : std::vector<std::string>());
    return {gradient, {}, {}, {}, {}, {}};
  }
};

at::Tensor redistribute_autograd(const at::Tensor& input, const std::string& plan,
                                 const std::vector<std::string>& groups, int64_t rank, const std::string& backward_plan,
                                 const std::vector<std::string>& backward_groups) {
  check_strided(input, "input");  // before autograd asks for its sizes
  return RedistributeFunction::apply(input, plan, groups, rank, backward_plan, backward_groups);
}

// Throws ValueError naming the argument that is nested, or a list with such a one.
void refuse_nested(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& given = torch::jit::peek(*stack, i, arguments.size());
    if (given.isTensor()) check_strided(given.toTensor(), arguments[i].name());
    if (!given.isTensorList()) continue;
    for (const at::Tensor& tensor : given.toTensorVector()) check_strided(tensor, arguments[i].name());
  }
  TORCH_CHECK_VALUE(false, op.schema().name(), ": takes no nested tensors");
}

}  // namespace

std::string bytes_of(const std::string& text) {
  try {
    return bytes_in(text, "plan");
  } catch (const UserError& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

ExecutablePtr executable_of(const std::string& plan, const std::vector<std::string>& groups, int64_t rank) {
  // Executables hold their groups weakly.
  static auto* kept = new BoundedCache<std::string, ExecutablePtr>(kMaxExecutables);
  std::vector<RankGroupPtr> found_groups;
  for (const std::string& name : groups) found_groups.push_back(group_named(name));
  const auto make = [&] { return std::make_shared<const Executable>(compiled_of(plan, Rank{rank}), found_groups); };
  const auto is_bound = [&](const ExecutablePtr& e) { return e->groups() == found_groups; };
  try {
    return kept->get_or_make(key_of(plan, groups, rank), make, is_bound);
  } catch (const UserError& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

void note_changed_tables() { ++tables_number; }

// The whole surface. `input` is this rank's part by the plan's source, the result its part by the destination, new and
// row-major; nothing else is written but `out`.
TORCH_LIBRARY(shardwright, m) {
  // backward_plan says how the gradient goes back; empty, the result has none.
  m.def(
      "redistribute(Tensor input, str plan, str[] groups, int rank, str backward_plan, str[] backward_groups) -> "
      "Tensor");
  // Into `out`: row-major, apart from `input`.
  m.def("redistribute_out(Tensor input, str plan, str[] groups, int rank, Tensor(a!) out) -> ()");
  // The same in two halves, with room for compute in between. The handle is good for one wait. It is one int64 on CPU,
  // expanded to more bytes than input and output have: who chooses what to keep for a backward by size then keeps one
  // of these, and never waits for a handle again.
  //
  // `sizes` are those of the global tensor where they are not the plan's own: then the plan only says the layouts, and
  // one for these sizes is made, over no other groups than these. `after` is part of the handle of a start that must
  // come before this one: all ranks have to start in one order, whatever a compiler makes of starts that do not depend
  // on each other. For the same reason both halves count as having side effects; those that are to be run again in a
  // backward, as in activation checkpointing, do not, under the name `recomputable`.
  for (const char* overload : {"", ".recomputable"}) {
    m.def(concat("redistribute_start", overload,
                 "(Tensor input, str plan, str[] groups, int rank, SymInt[]? sizes=None, Tensor? after=None) -> Tensor")
              .c_str());
    m.def(concat("redistribute_wait", overload,
                 "(Tensor handle, Tensor input, str plan, int rank, SymInt[]? sizes=None) -> Tensor")
              .c_str());
  }
  // The plan for other sizes, then the names of its groups, out of these. The kernel is in operators.py.
  m.def("plan_for_sizes(str plan, str[] groups, int rank, int[] sizes) -> str[]");
  // Matrix products next to a redistribute, in chunks. `program` says what the inputs and the results are.
  m.def("matmul(Tensor[] inputs, str program, str[] groups, int rank) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(shardwright, CompositeExplicitAutograd, m) {
  m.impl("redistribute", redistribute);
  m.impl("redistribute_out", redistribute_out);
  m.impl("redistribute_start", redistribute_start);
  m.impl("redistribute_start.recomputable", redistribute_start);
  m.impl("redistribute_wait", redistribute_wait);
  m.impl("redistribute_wait.recomputable", redistribute_wait);
  m.impl("matmul", matmul);
}

// Nested tensors have keys of their own, which the kernels above are not for.
TORCH_LIBRARY_IMPL(shardwright, AutogradNestedTensor, m) {
  for (const char* name : {"redistribute_out", "redistribute_start", "redistribute_wait", "matmul"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_nested>());
  }
}

TORCH_LIBRARY_IMPL(shardwright, Autograd, m) { m.impl("redistribute", redistribute_autograd); }

}  // namespace shardwright
