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

// Maximum numbers of entries of the caches in this file. Few attentions are cached, because each batch of documents has
// attentions of its own, which are not used again.
constexpr size_t kMaxExecutables = 8192;
constexpr size_t kMaxAttentions = 128;

// Returns the bytes in the text of a plan, matmul or attention. Throws c10::ValueError if `text` is not a label and
// base64.
std::string plan_bytes_of(const std::string& text) {
  try {
    return bytes_from_text(text, "plan");
  } catch (const UserError& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

// Returns `output`, or a clone if it aliases `input`, because operators must not return their inputs.
at::Tensor unaliased(const at::Tensor& output, const at::Tensor& input) {
  return output.is_alias_of(input) ? output.clone(at::MemoryFormat::Contiguous) : output;
}

// Returns the tensor, or a copy if it is not row-major. Throws c10::ValueError that names `argument` for undefined,
// nested and sparse tensors.
at::Tensor row_major(const at::Tensor& input, const std::string& argument) {
  check_strided(input, argument);
  return input.contiguous();
}

// Set by set_check_ranks().
std::atomic<bool> checks_ranks{false};

// The signature of the operator compare_ranks (see its schema).
using CompareRanks = void(const at::Tensor&, const std::string&, const std::vector<std::string>&, int64_t,
                          const std::optional<at::Tensor>&);

// Returns the executable of `program`, a text, which the caller runs on `input` next. Before, the ranks compare the
// program if set_check_ranks is on.
ExecutablePtr executable_to_run(const at::Tensor& input, const std::string& program,
                                const std::vector<std::string>& groups, int64_t rank,
                                const std::optional<at::Tensor>& out = std::nullopt) {
  if (checks_ranks) {
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow("shardwright::compare_ranks", "").typed<CompareRanks>();
    handle.call(input, program, groups, rank, out);
  }
  return executable_of(program, groups, rank);
}

// The operator redistribute. The unused arguments are for autograd (RedistributeFunction).
at::Tensor redistribute(const at::Tensor& input, const std::string& plan, const std::vector<std::string>& groups,
                        int64_t rank, const std::string& /*backward_plan*/,
                        const std::vector<std::string>& /*backward_groups*/) {
  const at::Tensor dense = row_major(input, "input");
  return unaliased(run(executable_to_run(dense, plan, groups, rank), dense), input);
}

// The operator redistribute_out.
void redistribute_out(const at::Tensor& input, const std::string& plan, const std::vector<std::string>& groups,
                      int64_t rank, at::Tensor& out) {
  {
    const at::AutoDispatchBelowADInplaceOrView guard;  // a copy into `out` must not bump its version a second time
    const at::Tensor dense = row_major(input, "input");
    run_into(executable_to_run(dense, plan, groups, rank, out), dense, out);
  }
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
}

// The redistributes that were started and not waited for, by number. A *handle* is a tensor whose value is the number,
// so a compiler may clone or copy it.
class StartedTransfers {
 public:
  struct Transfer {
    at::Tensor input;
    at::Tensor output;
    WorkPtr work;  // null if nothing is pending
  };

  // Stores a transfer and returns its number.
  int64_t add(Transfer transfer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    transfers_.emplace(next_, std::move(transfer));
    return next_++;
  }

  // Removes the transfer with this number and returns it. Throws c10::ValueError if there is none.
  Transfer take(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = transfers_.find(number);
    TORCH_CHECK_VALUE(
        found != transfers_.end(), "handle must be of a redistribute under way, got number ", number,
        ", which this process has not started or has waited for. Wait for each handle once, in the process "
        "that started it");
    Transfer transfer = std::move(found->second);
    transfers_.erase(found);
    return transfer;
  }

 private:
  std::mutex mutex_;
  int64_t next_ = 1;
  std::unordered_map<int64_t, Transfer> transfers_;
};

StartedTransfers& started_transfers() {
  static StartedTransfers* instance = new StartedTransfers;  // never destroyed: threads may still run at exit
  return *instance;
}

// The signature of the operator plan_for_sizes (see its schema).
using PlanForSizes = std::vector<std::string>(const std::string&, const std::vector<std::string>&, int64_t,
                                              c10::IntArrayRef, bool);

// The number of changes of the tables from which plans are made.
std::atomic<int64_t> tables_version{0};

// Returns the cache key of a text with groups and a rank.
std::string key_of(const std::string& text, const std::vector<std::string>& groups, int64_t rank) {
  std::string key = text;
  for (const std::string& name : groups) key += '\n' + name;
  return key += '\n' + std::to_string(rank);
}

// Calls the operator plan_for_sizes, which is implemented in Python, where the tables are. Returns the plan, then the
// names of its groups. Results are cached, unless they depend on which groups exist (`make_groups` is false).
std::vector<std::string> plan_for_sizes(const std::string& plan, const std::vector<std::string>& groups, int64_t rank,
                                        c10::IntArrayRef sizes, bool make_groups) {
  static auto* cache = new BoundedCache<std::string, std::vector<std::string>>(kMaxExecutables);
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("shardwright::plan_for_sizes", "").typed<PlanForSizes>();
  if (!make_groups) return handle.call(plan, groups, rank, sizes, make_groups);
  // The version is read before the plan is made. So a plan that is made while the tables change has an old version, and
  // is not found later.
  std::string key = key_of(plan, groups, rank);
  key += '\n' + std::to_string(tables_version);
  for (const int64_t size : sizes) key += ' ' + std::to_string(size);
  return cache->get_or_make(key, [&] { return handle.call(plan, groups, rank, sizes, make_groups); });
}

// The operator redistribute_start. Returns a handle. `after` is not read: it only makes this start depend on another
// one.
at::Tensor redistribute_start(const at::Tensor& input, const std::string& plan, const std::vector<std::string>& groups,
                              int64_t rank, at::OptionalIntArrayRef sizes, const std::optional<at::Tensor>& /*after*/,
                              bool make_groups) {
  const at::Tensor dense = row_major(input, "input");
  ExecutablePtr executable;
  if (sizes.has_value()) {
    std::vector<std::string> names = plan_for_sizes(plan, groups, rank, *sizes, make_groups);
    const std::string text = std::move(names.front());
    names.erase(names.begin());
    executable = executable_to_run(dense, text, names, rank);
  } else {
    executable = executable_to_run(dense, plan, groups, rank);
  }
  auto [output, work] = start(executable, dense, /*input_may_change=*/false, /*by_messages=*/false);
  // The handle has more bytes than input and output (see the schema).
  const auto size = static_cast<int64_t>(std::max(dense.nbytes(), output.nbytes())) / 8 + 1;
  at::Tensor handle = at::empty({1}, at::TensorOptions(at::kLong).device(at::kCPU));
  *handle.mutable_data_ptr<int64_t>() = started_transfers().add({dense, output, std::move(work)});
  return handle.expand({size});
}

// The operator redistribute_wait. Waits for the transfer of a handle and returns its output. `input` is an argument so
// that compilers do not reuse its memory before the wait.
at::Tensor redistribute_wait(const at::Tensor& handle, const at::Tensor& input, const std::string& /*plan*/,
                             int64_t /*rank*/, at::OptionalIntArrayRef /*sizes*/) {
  check_strided(handle, "handle");
  TORCH_CHECK_VALUE(handle.is_cpu() && handle.scalar_type() == at::kLong && handle.numel() > 0,
                    "handle must be the tensor that redistribute_start returned, got ",
                    c10::toString(handle.scalar_type()), " of shape ", handle.sizes(), " on ", handle.device());
  const StartedTransfers::Transfer transfer = started_transfers().take(*handle.const_data_ptr<int64_t>());
  if (transfer.work) transfer.work->wait();
  return unaliased(transfer.output, input);
}

// The operator matmul. products/matmul.h lists the inputs and outputs.
std::vector<at::Tensor> matmul(const std::vector<at::Tensor>& inputs, const std::string& program,
                               const std::vector<std::string>& groups, int64_t rank) {
  std::vector<at::Tensor> dense;
  for (const at::Tensor& input : inputs) dense.push_back(row_major(input, "inputs"));
  TORCH_CHECK_VALUE(!dense.empty(), "inputs must be a list of at least one tensor, got none");
  std::vector<at::Tensor> outputs = run_all(executable_to_run(dense[0], program, groups, rank), dense);
  for (at::Tensor& output : outputs) {
    for (const at::Tensor& input : inputs) output = unaliased(output, input);
  }
  return outputs;
}

// The origin of matrix products in chunks. It stores the product and its schedule as bytes, and decodes them on each
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
    // The dims of a weight's gradient may have different orders on different ranks. So the layouts of a tensor that is
    // not moved are not compared.
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

// The signature of the operator redistribute.
using Redistribute = at::Tensor(const at::Tensor&, const std::string&, const std::vector<std::string>&, int64_t,
                                const std::string&, const std::vector<std::string>&);

// Returns the operator redistribute.
const c10::TypedOperatorHandle<Redistribute>& redistribute_handle() {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("shardwright::redistribute", "").typed<Redistribute>();
  return handle;
}

// True if neither the source nor the destination of a plan has pending reductions.
bool has_no_pending_reductions(const std::string& text) {
  const Plan plan = from_bytes(plan_bytes_of(text));
  return plan.src.partial_dims().empty() && plan.dst.partial_dims().empty();
}

// The autograd function of redistribute. Its backward moves the gradient by backward_plan. The backward is itself
// differentiable only if backward_plan is the reverse of the plan, that is, unless source or destination have pending
// reductions: then the gradient has R in place of P.
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
    const bool is_reversible = at::GradMode::is_enabled() && has_no_pending_reductions(text("plan"));
    at::Tensor gradient = redistribute_handle().call(
        gradients[0], backward_plan, names("backward_groups"), context->saved_data["rank"].toInt(),
        is_reversible ? text("plan") : std::string(), is_reversible ? names("groups") : std::vector<std::string>());
    return {gradient, {}, {}, {}, {}, {}};
  }
};

// The autograd kernel of the operator redistribute.
at::Tensor redistribute_autograd(const at::Tensor& input, const std::string& plan,
                                 const std::vector<std::string>& groups, int64_t rank, const std::string& backward_plan,
                                 const std::vector<std::string>& backward_groups) {
  check_strided(input, "input");  // checked before autograd reads its sizes
  return RedistributeFunction::apply(input, plan, groups, rank, backward_plan, backward_groups);
}

// A kernel for all operators: throws c10::ValueError that names the argument that is, or contains, a nested tensor.
void reject_nested(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    if (value.isTensor()) check_strided(value.toTensor(), arguments[i].name());
    if (!value.isTensorList()) continue;
    for (const at::Tensor& tensor : value.toTensorVector()) check_strided(tensor, arguments[i].name());
  }
  TORCH_CHECK_VALUE(false, op.schema().name(), ": arguments must be plain tensors, got a nested tensor");
}

// Returns the program of a rank for the text of a plan, matmul or attention, and counts the compilation.
std::shared_ptr<const CompiledProgram> compile_text(const std::string& text, Rank rank) {
  ++counters().compiled;
  const std::string bytes = plan_bytes_of(text);
  if (is_attention(bytes)) return compiled_attention(bytes, rank);
  if (!is_matmul(bytes)) return CompiledProgram::from_plan_bytes(bytes, rank);
  const auto [matmul, schedule] = matmul_from_bytes(bytes);
  return std::make_shared<CompiledProgram>(compile(matmul, schedule, rank), plans_of(matmul),
                                           std::make_unique<MatmulOrigin>(bytes), rank);
}

// Returns the cache for values that are made from `text`: one for attentions, one for other texts.
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

ExecutablePtr executable_of(const std::string& text, const std::vector<std::string>& groups, int64_t rank) {
  auto& cache = cache_for<ExecutablePtr>(text);  // executables hold their groups weakly
  std::vector<RankGroupPtr> found_groups;
  for (const std::string& name : groups) found_groups.push_back(group_named(name));
  const auto make = [&] { return std::make_shared<const Executable>(compiled_of(text, Rank{rank}), found_groups); };
  const auto has_found_groups = [&](const ExecutablePtr& e) { return e->groups() == found_groups; };
  try {
    return cache.get_or_make(key_of(text, groups, rank), make, has_found_groups);
  } catch (const UserError& error) {
    C10_THROW_ERROR(ValueError, error.what());
  }
}

void invalidate_sized_plans() { ++tables_version; }

void set_check_ranks(bool enabled) { checks_ranks = enabled; }

// The schemas. `input` is this rank's part of the plan's source. The result is a new row-major tensor, this rank's part
// of the plan's destination. No argument but `out` is written.
//
// Compilers must not put these operators into CUDA graphs (torch.compile with mode="reduce-overhead"), because a replay
// does not run their code on the host, such as the lookup of handles.
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
  // CPU, expanded so that it has more bytes than input and output. Compilers save the smallest tensors for a backward;
  // so they save the input or the output, not the handle, and do not wait for a handle twice.
  //
  // Without `sizes`, `plan` runs over `groups`. With `sizes`, the shape of the global tensor, `plan` only gives the
  // layouts. Then the operator makes a plan when it runs, as eager code does: from these layouts with this shape, and
  // from the current tables. So the plan does not depend on the time at which this rank traced the graph. `groups` are
  // then the groups of the mesh's dims and of meshes flattened from it, or empty for the default group.
  // `make_groups`: true if other groups may be made.
  //
  // All ranks must start transfers in the same order, but a compiler may reorder independent operators. So `after` is a
  // slice of the handle of the start that must come before this one, and both halves are registered as having side
  // effects. The overloads `recomputable` are not, because activation checkpointing runs them again in a backward.
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
  // Raises an error on all ranks unless all ranks pass the same program. Implemented in Python (runtime/checking.py).
  m.def("compare_ranks(Tensor input, str program, str[] groups, int rank, Tensor? out) -> ()", tags);
  // Matrix products that overlap with a redistribute. `program`, the text of a Matmul, defines the inputs and outputs.
  m.def("matmul(Tensor[] inputs, str program, str[] groups, int rank) -> Tensor[]", tags);
  // A product (ProductPlan) in compiled code, and its gradients. Implemented in Python (matmul/graphs.py).
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
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&reject_nested>());
  }
}

TORCH_LIBRARY_IMPL(shardwright, Autograd, m) { m.impl("redistribute", redistribute_autograd); }

}  // namespace shardwright
