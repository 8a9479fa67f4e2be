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

#include "attention/serialize.h"
#include "moves/describe.h"
#include "planning/serialize.h"
#include "products/compile.h"
#include "products/serialize.h"
#include "runtime/attention_program.h"
#include "runtime/c10d/process_groups.h"
#include "runtime/executor.h"
#include "support/bounded_cache.h"
#include "support/error.h"
#include "support/text.h"
#include "support/wire_format.h"

namespace shardwright {
namespace {

// Maximum numbers of entries of each cache in this file. Every batch of documents has attentions of its own, so few of
// them are kept.
constexpr size_t kMaxExecutables = 8192;
constexpr size_t kMaxAttentions = 128;

// Returns `output`, cloned if it aliases `input`: operators must not return their inputs.
at::Tensor fresh(const at::Tensor& output, const at::Tensor& input) {
  return output.is_alias_of(input) ? output.clone(at::MemoryFormat::Contiguous) : output;
}

// Returns a row-major tensor of the same content. Throws c10::ValueError that names `argument` for nested and sparse
// tensors.
at::Tensor row_major(const at::Tensor& input, const std::string& argument) {
  check_strided(input, argument);
  return input.contiguous();
}

// Set by compare_ranks().
std::atomic<bool> ranks_compare{false};

// The signature of the operator compare_ranks.
using Compare = void(const at::Tensor&, const std::string&, const std::vector<std::string>&, int64_t,
                     const std::optional<at::Tensor>&);

// Returns the executable of a program that will run on `input` next. Under sw.debug.check_ranks the ranks first compare
// the program.
ExecutablePtr about_to_run(const at::Tensor& input, const std::string& program, const std::vector<std::string>& groups,
                           int64_t rank, const std::optional<at::Tensor>& out = std::nullopt) {
  if (ranks_compare) {
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow("shardwright::compare_ranks", "").typed<Compare>();
    handle.call(input, program, groups, rank, out);
  }
  return executable_of(program, groups, rank);
}

// The backward arguments are only for autograd (RedistributeFunction).
at::Tensor redistribute(const at::Tensor& input, const std::string& plan, const std::vector<std::string>& groups,
                        int64_t rank, const std::string& /*backward_plan*/,
                        const std::vector<std::string>& /*backward_groups*/) {
  const at::Tensor dense = row_major(input, "input");
  return fresh(run(about_to_run(dense, plan, groups, rank), dense), input);
}

void redistribute_out(const at::Tensor& input, const std::string& plan, const std::vector<std::string>& groups,
                      int64_t rank, at::Tensor& out) {
  {
    const at::AutoDispatchBelowADInplaceOrView guard;  // a copy into `out` must not bump its version a second time
    const at::Tensor dense = row_major(input, "input");
    run_into(about_to_run(dense, plan, groups, rank, out), dense, out);
  }
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
}

// Transfers that were started and not waited for, by number. A graph passes the number as the value of a tensor, so a
// compiler may clone or copy that tensor.
class UnderWay {
 public:
  struct Transfer {
    at::Tensor input;
    at::Tensor output;
    WorkPtr work;  // null if nothing is pending
  };

  // Stores a transfer and returns its handle.
  int64_t add(Transfer transfer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    transfers_.emplace(next_, std::move(transfer));
    return next_++;
  }

  // Removes a transfer and returns it. Throws c10::ValueError if it is not under way.
  Transfer take(int64_t handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = transfers_.find(handle);
    TORCH_CHECK_VALUE(found != transfers_.end(), "handle must be of a redistribute under way, got number ", handle,
                      "; wait for each handle once, in the process that started it");
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
  static UnderWay* instance = new UnderWay;  // never destroyed: threads may still run at exit
  return *instance;
}

// The signature of the operator plan_for_sizes, which returns the plan for these sizes, followed by the names of the
// groups that the plan needs.
using PlanForSizes = std::vector<std::string>(const std::string&, const std::vector<std::string>&, int64_t,
                                              c10::IntArrayRef, bool);

// Incremented with every change of the tables from which plans are made.
std::atomic<int64_t> tables_number{0};

// Returns the cache key of a program bound to groups.
std::string key_of(const std::string& text, const std::vector<std::string>& groups, int64_t rank) {
  std::string key = text;
  for (const std::string& name : groups) key += '\n' + name;
  return key += '\n' + std::to_string(rank);
}

// Returns the plan for these sizes, then the names of its groups. Planning is done in Python, which has the tables.
// Results are cached here, unless they depend on which groups exist (`make_groups` is false).
std::vector<std::string> plan_for_sizes(const std::string& plan, const std::vector<std::string>& groups, int64_t rank,
                                        c10::IntArrayRef sizes, bool make_groups) {
  static auto* kept = new BoundedCache<std::string, std::vector<std::string>>(kMaxExecutables);
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("shardwright::plan_for_sizes", "").typed<PlanForSizes>();
  if (!make_groups) return handle.call(plan, groups, rank, sizes, make_groups);
  // The number is read before the plan is made, so a plan that is made while the tables change is not found later.
  std::string key = key_of(plan, groups, rank);
  key += '\n' + std::to_string(tables_number);
  for (const int64_t size : sizes) key += ' ' + std::to_string(size);
  return kept->get_or_make(key, [&] { return handle.call(plan, groups, rank, sizes, make_groups); });
}

// Returns the handle of the transfer (see the schema). `after` only orders starts.
at::Tensor redistribute_start(const at::Tensor& input, const std::string& plan, const std::vector<std::string>& groups,
                              int64_t rank, at::OptionalIntArrayRef sizes, const std::optional<at::Tensor>& /*after*/,
                              bool make_groups) {
  const at::Tensor dense = row_major(input, "input");
  ExecutablePtr executable;
  if (sizes.has_value()) {
    std::vector<std::string> names = plan_for_sizes(plan, groups, rank, *sizes, make_groups);
    const std::string text = std::move(names.front());
    names.erase(names.begin());
    executable = about_to_run(dense, text, names, rank);
  } else {
    executable = about_to_run(dense, plan, groups, rank);
  }
  auto [output, work] = start(executable, dense, /*input_may_change=*/false);
  const auto size = static_cast<int64_t>(std::max(dense.nbytes(), output.nbytes())) / 8 + 1;
  at::Tensor handle = at::empty({1}, at::TensorOptions(at::kLong).device(at::kCPU));
  *handle.mutable_data_ptr<int64_t>() = under_way().add({dense, output, std::move(work)});
  return handle.expand({size});
}

// Waits for the transfer of a handle and returns its output. `input` is an argument so that compilers do not reuse its
// memory before the wait.
at::Tensor redistribute_wait(const at::Tensor& handle, const at::Tensor& input, const std::string& /*plan*/,
                             int64_t /*rank*/, at::OptionalIntArrayRef /*sizes*/) {
  check_strided(handle, "handle");
  TORCH_CHECK_VALUE(handle.is_cpu() && handle.scalar_type() == at::kLong && handle.numel() > 0,
                    "handle must be the tensor that redistribute_start returned, got ",
                    c10::toString(handle.scalar_type()), " of shape ", handle.sizes(), " on ", handle.device());
  const UnderWay::Transfer transfer = under_way().take(*handle.const_data_ptr<int64_t>());
  if (transfer.work) transfer.work->wait();
  return fresh(transfer.output, input);
}

// Runs products in chunks; products/matmul.h lists their inputs and outputs.
std::vector<at::Tensor> matmul(const std::vector<at::Tensor>& inputs, const std::string& program,
                               const std::vector<std::string>& groups, int64_t rank) {
  std::vector<at::Tensor> dense;
  for (const at::Tensor& input : inputs) dense.push_back(row_major(input, "inputs"));
  TORCH_CHECK_VALUE(!dense.empty(), "inputs must be a list of at least one tensor, got none");
  std::vector<at::Tensor> outputs = run_all(about_to_run(dense[0], program, groups, rank), dense);
  for (at::Tensor& output : outputs) {
    for (const at::Tensor& input : inputs) output = fresh(output, input);
  }
  return outputs;
}

// The origin of matrix products in chunks. It keeps the product and its schedule as bytes, and decodes them on each
// call.
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
    // A tensor that is not moved may be a weight's gradient, whose dims have another order on another rank.
    const bool moves = !plan.steps.empty();
    const std::string stays = "not moved";
    std::string plans;
    for (const Plan* executed : plans_of(matmul)) plans += executed->steps.empty() ? "" : to_bytes(*executed);
    return {{"kind", std::holds_alternative<GatherMatmul>(matmul) ? "gather" : "scatter"},
            {"tensor", moves ? concat(plan.src.dtype().name(), "[", join(plan.src.shape()), "]") : stays},
            {"dtype", plan.src.dtype().name()},
            {"mesh", plan.src.mesh().to_string()},
            {"src", moves ? plan.src.placements_string() : stays},
            {"dst", moves ? plan.dst.placements_string() : stays},
            {"operands", operands_text(matmul)},
            {"method", method_name(schedule.method)},
            {"chunks", chunks_text(schedule)},
            {"plan bytes", concat(plans.size(), " with hash ", std::hash<std::string>()(plans))}};
  }

 private:
  std::string matmul_bytes_;
};

using Redistribute = at::Tensor(const at::Tensor&, const std::string&, const std::vector<std::string>&, int64_t,
                                const std::string&, const std::vector<std::string>&);

const c10::TypedOperatorHandle<Redistribute>& redistribute_handle() {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("shardwright::redistribute", "").typed<Redistribute>();
  return handle;
}

// True if neither the source nor the destination of a plan has pending reductions.
bool is_without_sums(const std::string& text) {
  const Plan plan = from_bytes(bytes_of(text));
  return plan.src.partial_dims().empty() && plan.dst.partial_dims().empty();
}

// The gradient is moved by backward_plan. The backward is itself differentiable only if backward_plan is the reverse of
// the plan. It is unless reductions are pending: then the gradient has R in place of P.
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
                                "shardwright::redistribute: backward_plan must be a plan if a gradient is needed, got "
                                "''; shardwright.graph.operator sets it for layouts with S, R, P(sum) and P(avg)");
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
  check_strided(input, "input");  // checked before autograd reads its sizes
  return RedistributeFunction::apply(input, plan, groups, rank, backward_plan, backward_groups);
}

// Throws a ValueError that names the argument that is nested, or that contains a nested tensor.
void refuse_nested(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    if (value.isTensor()) check_strided(value.toTensor(), arguments[i].name());
    if (!value.isTensorList()) continue;
    for (const at::Tensor& tensor : value.toTensorVector()) check_strided(tensor, arguments[i].name());
  }
  TORCH_CHECK_VALUE(false, op.schema().name(), ": arguments must be plain tensors, got a nested tensor");
}

}  // namespace

std::string bytes_of(const std::string& text) {
  try {
    return bytes_from_text(text, "plan");
  } catch (const UserError& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

namespace {

// Compiles a serialized plan, matmul or attention for a rank.
std::shared_ptr<const CompiledProgram> compile_text(const std::string& text, Rank rank) {
  ++counters().compiled;
  const std::string bytes = bytes_of(text);
  if (is_attention(bytes)) return compiled_attention(bytes, rank);
  if (!is_matmul(bytes)) return CompiledProgram::from_plan_bytes(bytes, rank);
  const auto [matmul, schedule] = matmul_from_bytes(bytes);
  return std::make_shared<CompiledProgram>(compile(matmul, schedule, rank), plans_of(matmul),
                                           std::make_unique<MatmulOrigin>(bytes), rank);
}

// Returns the cache of values made from texts of the same kind.
template <typename Value>
BoundedCache<std::string, Value>& cache_for(const std::string& text) {
  static auto* attentions = new BoundedCache<std::string, Value>(kMaxAttentions);
  static auto* others = new BoundedCache<std::string, Value>(kMaxExecutables);
  return is_attention_text(text) ? *attentions : *others;
}

}  // namespace

std::shared_ptr<const CompiledProgram> compiled_of(const std::string& text, Rank rank) {
  auto& cache = cache_for<std::shared_ptr<const CompiledProgram>>(text);
  return cache.get_or_make(key_of(text, {}, to_int(rank)), [&] { return compile_text(text, rank); });
}

ExecutablePtr executable_of(const std::string& plan, const std::vector<std::string>& groups, int64_t rank) {
  auto& cache = cache_for<ExecutablePtr>(plan);  // executables hold their groups weakly
  std::vector<RankGroupPtr> found_groups;
  for (const std::string& name : groups) found_groups.push_back(group_named(name));
  const auto make = [&] { return std::make_shared<const Executable>(compiled_of(plan, Rank{rank}), found_groups); };
  const auto is_bound = [&](const ExecutablePtr& e) { return e->groups() == found_groups; };
  try {
    return cache.get_or_make(key_of(plan, groups, rank), make, is_bound);
  } catch (const UserError& error) {
    C10_THROW_ERROR(ValueError, error.what());
  }
}

void invalidate_sized_plans() { ++tables_number; }

void compare_ranks(bool on) { ranks_compare = on; }

// All operators. `input` is this rank's part in the plan's source. The result is its part in the destination, new and
// row-major. Nothing but `out` is written.
//
// Compilers must not put them into CUDA graphs (torch.compile with mode="reduce-overhead"), because replays would not
// run their code on the host, such as the lookup of handles.
TORCH_LIBRARY(shardwright, m) {
  const std::vector<at::Tag> tags{at::Tag::cudagraph_unsafe};
  // backward_plan moves the gradient back. If it is empty, the result has no gradient.
  m.def(
      "redistribute(Tensor input, str plan, str[] groups, int rank, str backward_plan, str[] backward_groups) -> "
      "Tensor",
      tags);
  // Writes into `out`, which must be row-major and not overlap `input`.
  m.def("redistribute_out(Tensor input, str plan, str[] groups, int rank, Tensor(a!) out) -> ()", tags);
  // redistribute in two halves, so that compute can run in between. A handle is valid for one wait. It is one int64 on
  // CPU, expanded to more bytes than input and output have: a compiler that chooses by size what to save for a backward
  // then saves the input or output instead of the handle, and does not wait for the handle again.
  //
  // With `sizes` (of the global tensor), `plan` only gives the layouts. The plan that runs is made when the operator
  // runs, as in eager code: from the layouts with these sizes and the current tables. So it does not depend on when
  // this rank traced. `groups` are then the groups of the mesh's dims and of meshes flattened from it, or empty for the
  // default group; `make_groups`: true if other groups may be made. Without `sizes`, `plan` itself runs, over these
  // groups.
  //
  // `after` is a slice of the handle of a start that must come before this one: all ranks must start in one order, even
  // if a compiler reorders independent starts. For the same reason both halves count as having side effects. The
  // overloads `recomputable`, for starts and waits that run again in a backward (activation checkpointing), do not.
  for (const char* overload : {"", ".recomputable"}) {
    m.def(concat("redistribute_start", overload,
                 "(Tensor input, str plan, str[] groups, int rank, SymInt[]? sizes=None, Tensor? after=None, "
                 "bool make_groups=True) -> Tensor")
              .c_str(),
          tags);
    m.def(concat("redistribute_wait", overload,
                 "(Tensor handle, Tensor input, str plan, int rank, SymInt[]? sizes=None) -> Tensor")
              .c_str(),
          tags);
  }
  // Returns the plan for these sizes, then the names of its groups. Implemented in Python (graph/plans.py).
  m.def("plan_for_sizes(str plan, str[] groups, int rank, int[] sizes, bool make_groups) -> str[]");
  // Raises on all ranks unless all are about to run the same program. Implemented in Python (operators.py).
  m.def("compare_ranks(Tensor input, str program, str[] groups, int rank, Tensor? out) -> ()", tags);
  // Matrix products that overlap with a redistribute. `program` defines the inputs and outputs.
  m.def("matmul(Tensor[] inputs, str program, str[] groups, int rank) -> Tensor[]", tags);
  // The same for compiled code, and its gradients. Implemented in Python (matmul/graphs.py).
  m.def(
      "multiply(Tensor x, Tensor[] weights, Tensor[] biases, Tensor[] scales, str product, str group, int rank) -> "
      "Tensor[]",
      tags);
  m.def(
      "multiply_backward(Tensor x, Tensor[] weights, Tensor[] dys, bool[] needs, str product, str group, int rank) "
      "-> Tensor[]",
      tags);
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

// Nested tensors have their own dispatch keys, for which the kernels above are not registered.
TORCH_LIBRARY_IMPL(shardwright, AutogradNestedTensor, m) {
  for (const char* name : {"redistribute_out", "redistribute_start", "redistribute_wait", "matmul"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_nested>());
  }
}

TORCH_LIBRARY_IMPL(shardwright, Autograd, m) { m.impl("redistribute", redistribute_autograd); }

}  // namespace shardwright
