#include "products/matmul.h"

#include <algorithm>
#include <map>

#include "products/scaled_dtypes.h"
#include "program/builder.h"
#include "support/error.h"
#include "support/match.h"

namespace shardwright {
namespace {

constexpr const char* kMethodNames[] = {"serial", "ring", "collective", "flags"};

// Returns the step that is chunked: the last step of a gather's plan, the first step of a scatter's plan. Returns
// nullptr if the plan has no steps.
const Step* chunked_step(const Matmul& matmul) {
  const Plan& plan = plan_of(matmul);
  if (plan.steps.empty()) return nullptr;
  return std::holds_alternative<GatherMatmul>(matmul) ? &plan.steps.back() : &plan.steps.front();
}

// Returns the size of a tensor along an axis. `dims` has the axis of each tensor dim.
int64_t size_of_axis(const std::vector<int>& dims, const Layout& layout, int axis) {
  return layout.shape()[std::find(dims.begin(), dims.end(), axis) - dims.begin()];
}

// Throws UserError unless both tensors have the same size and the same cuts along an axis, which both have.
void check_axis(int axis, const std::vector<int>& a_dims, const Layout& a, const std::vector<int>& b_dims,
                const Layout& b) {
  const auto dim_in = [&](const std::vector<int>& dims) {
    return static_cast<int>(std::find(dims.begin(), dims.end(), axis) - dims.begin());
  };
  check_user(size_of_axis(a_dims, a, axis) == size_of_axis(b_dims, b, axis),
             "tensors must have the same size along a common axis, got ", size_of_axis(a_dims, a, axis), " for dim ",
             dim_in(a_dims), " of ", a, " and ", size_of_axis(b_dims, b, axis), " for dim ", dim_in(b_dims), " of ", b);
  check_user(a.cuts(dim_in(a_dims)) == b.cuts(dim_in(b_dims)),
             "tensors must have the same cuts along a common axis, got dim ", dim_in(a_dims), " of ", a, " and dim ",
             dim_in(b_dims), " of ", b);
}

// Throws UserError unless products of these dtypes are supported, with or without scales.
void check_dtypes(const Layout& lhs, const Layout& rhs, const std::optional<Scaling>& scaling) {
  if (!scaling) {
    check_user(lhs.dtype() == rhs.dtype(), "operands must have the same dtype, got ", lhs, " and ", rhs);
    check_argument(lhs.dtype().kind() == DTypeKind::kFloat, "dtype", "a floating dtype for products without scales",
                   lhs.dtype().name());
    return;
  }
  check_argument(takes_scales(lhs.dtype()) && takes_scales(rhs.dtype()), "operands with scales",
                 "float8_e4m3fn or float8_e5m2", lhs.dtype().name(), " and ", rhs.dtype().name());
  const bool are_both_e5m2 = lhs.dtype() == DType::kFloat8E5M2 && rhs.dtype() == DType::kFloat8E5M2;
  check_user(!are_both_e5m2, "operands with scales must not both be float8_e5m2, got two of them");
  const DType result = scaling->result;
  check_argument(is_scaled_result(result), "out_dtype", "bfloat16 or float32 with scales", result.name());
}

// Throws UserError unless both operands fit the contraction, are on `mesh`, have supported dtypes, and are cut alike
// along summed axes.
void check_operands(const Contraction& axes, const Layout& lhs, const Layout& rhs, const Mesh& mesh,
                    const std::optional<Scaling>& scaling) {
  check_user(axes.lhs.size() == lhs.shape().size() && axes.rhs.size() == rhs.shape().size(),
             "contraction must have one axis for each dim of its operands, got ", axes, " for ", lhs, " and ", rhs);
  check_user(lhs.mesh() == mesh && rhs.mesh() == mesh, "operands must be on the plan's mesh (", mesh, "), got ", lhs,
             " and ", rhs);
  check_dtypes(lhs, rhs, scaling);
  for (const int axis : axes.lhs) {
    if (axes.is_summed(axis)) check_axis(axis, axes.lhs, lhs, axes.rhs, rhs);
  }
}

// Throws UserError unless the scales of the moved operand's rows are placed and moved like the rows.
void check_scales(const GatherMatmul& matmul) {
  const Scaling& scaling = *matmul.scaling;
  std::vector<int> free_dims;
  for (size_t j = 0; j < matmul.products.size(); ++j) {
    const auto& product = matmul.products[j];
    const std::vector<int> dims = free_dims_of(product.axes, product.axes.lhs);
    check_user(j == 0 || dims == free_dims, "products with scales must all sum over the same dims, got ", product.axes,
               " and ", matmul.products[0].axes);
    check_user(!product.has_bias, "bias must be absent with scaled operands, got one; add it to the result");
    free_dims = dims;
  }
  check_user(scaling.by_row == scaling.plan.has_value(),
             "scales must have a plan if each row has a scale, and no plan if each tensor has one scale, got ",
             scaling.by_row ? "no plan for scales per row" : "a plan for one scale per tensor");
  if (!scaling.by_row) return;
  const auto check_match = [&](const Layout& scales, const Layout& operand) {
    bool fits = scales.dtype() == DType::kFloat32 && scales.mesh() == operand.mesh() &&
                scales.shape().size() == free_dims.size();
    for (size_t i = 0; fits && i < free_dims.size(); ++i) {
      fits = scales.shape()[i] == operand.shape()[free_dims[i]] &&
             scales.cuts(static_cast<int>(i)) == operand.cuts(free_dims[i]);
    }
    check_user(fits, "scales must be float32 and sharded like the rows of ", operand, ", got ", scales);
  };
  check_match(scaling.plan->src, matmul.plan.src);
  check_match(scaling.plan->dst, matmul.plan.dst);
}

// Throw UserError unless the operands, the plan and the scales fit each other. The schedule is not checked.
void check_tensors(const GatherMatmul& matmul) {
  check_argument(!matmul.products.empty(), "products", "a list of at least one product", "none");
  for (const auto& product : matmul.products) {
    check_operands(product.axes, matmul.plan.dst, product.other, matmul.plan.dst.mesh(), matmul.scaling);
    check_argument(!product.has_bias || !product.axes.out.empty(), "bias", "absent for a result without dims", "one");
  }
  check_argument(matmul.plan.dst.partial_dims().empty(), "operand", "gathered to a layout without pending reductions",
                 matmul.plan.dst);
  if (matmul.scaling) check_scales(matmul);
}

void check_tensors(const MatmulScatter& matmul) {
  check_argument(!matmul.terms.empty(), "terms", "a list of at least one term", "none");
  const Layout& result = matmul.plan.src;
  const DType& dtype = matmul.scaling ? matmul.scaling->result : matmul.terms[0].lhs.dtype();
  check_user(result.dtype() == dtype, "result must have the dtype of the product (", dtype.name(), "), got ", result);
  check_user(!matmul.scaling || !matmul.scaling->plan, "scales must not move if operands do not move, got a plan for ",
             "scales");
  for (const auto& term : matmul.terms) {
    check_operands(term.axes, term.lhs, term.rhs, result.mesh(), matmul.scaling);
    check_user(term.axes.out.size() == result.shape().size(),
               "contraction must have one axis for each dim of the result, got ", term.axes, " for ", result);
    for (const int axis : term.axes.out) {
      const bool is_in_lhs = has_axis(term.axes.lhs, axis);
      check_axis(axis, is_in_lhs ? term.axes.lhs : term.axes.rhs, is_in_lhs ? term.lhs : term.rhs, term.axes.out,
                 result);
    }
  }
}

// Throws UserError if the distances that the user chose are for another method than ring, or not each distance once.
void check_distances(const Schedule& schedule, int64_t partners) {
  if (schedule.distances.empty()) return;
  check_user(schedule.method == Method::kRing, "chunks must be a number for method '", method_name(schedule.method),
             "', got the distances ", chunks_text(schedule));
  std::vector<int64_t> distances;
  for (const std::vector<int64_t>& chunk : schedule.distances)
    distances.insert(distances.end(), chunk.begin(), chunk.end());
  std::sort(distances.begin(), distances.end());
  bool has_each_once = static_cast<int64_t>(distances.size()) == partners - 1;
  for (size_t i = 0; i < distances.size() && has_each_once; ++i) {
    has_each_once = distances[i] == static_cast<int64_t>(i) + 1;
  }
  check_user(has_each_once, "chunks must have each distance from 1 to ", partners - 1, " once, for ", partners,
             " ranks, got ", chunks_text(schedule));
}

// Returns the text of one tensor in operands_text: "0=6 1=5(0) float32; ".
std::string operand_text(const std::vector<int>& axes, const Layout& layout) {
  std::map<int, std::string> by_axis;
  for (int d = 0; d < layout.ndim(); ++d) {
    std::string& text = by_axis[axes[d]];
    text = concat(axes[d], "=", layout.shape()[d]);
    for (const Cut& cut : layout.cuts(d)) text += concat("(", cut.mesh_dim, ")");
  }
  std::string all;
  for (const auto& [axis, text] : by_axis) all += text + " ";
  return concat(all, layout.dtype().name(), "; ");
}

}  // namespace

std::string operands_text(const Matmul& matmul) {
  return match(
      matmul,
      [](const GatherMatmul& gather) {
        std::string text = operand_text(gather.products[0].axes.lhs, gather.plan.src);
        for (const auto& product : gather.products) text += operand_text(product.axes.rhs, product.other);
        return text;
      },
      [](const MatmulScatter& scatter) {
        std::string text = operand_text(scatter.terms[0].axes.out, scatter.plan.src);
        for (const auto& term : scatter.terms) {
          text += operand_text(term.axes.lhs, term.lhs) + operand_text(term.axes.rhs, term.rhs);
        }
        return text;
      });
}

const char* method_name(Method method) { return kMethodNames[static_cast<int>(method)]; }

Method parse_method(const std::string& name) {
  for (const Method method : {Method::kSerial, Method::kRing, Method::kCollective, Method::kFlags}) {
    if (name == method_name(method)) return method;
  }
  throw UserError(concat("method must be one of serial, ring, collective, flags, got '", name, "'"));
}

namespace {

// Returns the distances of a schedule as chunks_text writes them: "1.3_2".
std::string distances_text(const Schedule& schedule) {
  std::vector<std::string> chunks;
  for (const std::vector<int64_t>& distances : schedule.distances) {
    std::vector<std::string> numbers;
    for (const int64_t distance : distances) numbers.push_back(std::to_string(distance));
    chunks.push_back(join(numbers, "."));
  }
  return join(chunks, "_") + (chunks.size() == 1 ? "_" : "");  // so that it does not look like a number of chunks
}

}  // namespace

std::string chunks_text(const Schedule& schedule) {
  std::string text = schedule.distances.empty() ? std::to_string(schedule.chunks) : distances_text(schedule);
  if (schedule.depth != 1 || schedule.sms_left != 0) text += concat(":", schedule.depth);
  if (schedule.sms_left != 0) text += concat(":", schedule.sms_left);
  return text;
}

const Plan& plan_of(const Matmul& matmul) {
  return std::visit([](const auto& m) -> const Plan& { return m.plan; }, matmul);
}

std::vector<const Plan*> plans_of(const Matmul& matmul) {
  std::vector<const Plan*> plans{&plan_of(matmul)};
  const auto* gather = std::get_if<GatherMatmul>(&matmul);
  if (gather != nullptr && gather->scaling && gather->scaling->plan) plans.push_back(&*gather->scaling->plan);
  return plans;
}

int64_t num_partners(const Matmul& matmul) {
  const Step* step = chunked_step(matmul);
  return step == nullptr ? 1 : step->before.mesh().group_size(step->mesh_dims);
}

bool has_ring(const Matmul& matmul) {
  const Step* step = chunked_step(matmul);
  return step != nullptr && step->op != StepOp::kAllReduce;
}

std::optional<std::string> why_only_serial(const Matmul& matmul) {
  const Step* step = chunked_step(matmul);
  if (step == nullptr) return "nothing is moved";
  const bool gathers = std::holds_alternative<GatherMatmul>(matmul);
  const std::string where = gathers ? "the last step of the operand's plan" : "the first step of the result's plan";
  const std::string what = concat(where, " (", step_op_name(step->op), ")");
  if (is_local(step->op)) return what + " moves nothing";
  const bool reduces = step->op == StepOp::kReduceScatter || step->op == StepOp::kAllReduce;
  if (gathers && reduces) return what + " reduces contributions, and must end before the product begins";
  if (step->policy != ReplicaPolicy::kAligned) return what + " divides the sending among replicas";
  if (step->rounds > 1) return what + " runs in rounds, to stay within a memory limit";
  if (!gathers && reduces && plan_of(matmul).src.dtype().kind() != DTypeKind::kFloat)
    return concat(what, " reduces ", plan_of(matmul).src.dtype().name(), ", and only floats are reduced in chunks");
  return std::nullopt;
}

void check(const Matmul& matmul, const Schedule& schedule) {
  const Plan& plan = plan_of(matmul);
  check_argument(schedule.chunks >= 1 && schedule.chunks <= kMaxChunks, "chunks", InRange{1, kMaxChunks},
                 schedule.chunks);
  check_argument(schedule.depth >= 1 && schedule.depth <= kMaxChunks, "depth", InRange{1, kMaxChunks}, schedule.depth);
  check_argument(schedule.sms_left >= 0 && schedule.sms_left <= kMaxSmsLeft, "sms_left", InRange{0, kMaxSmsLeft},
                 schedule.sms_left);
  std::visit([](const auto& m) { check_tensors(m); }, matmul);
  if (schedule.method == Method::kSerial) {
    check_argument(schedule.depth == 1, "depth", "1 for method 'serial', which overlaps nothing", schedule.depth);
    check_argument(schedule.sms_left == 0, "sms_left", "0 for method 'serial', which overlaps nothing",
                   schedule.sms_left);
    return;
  }
  const std::optional<std::string> reason = why_only_serial(matmul);
  check_user(!reason, "method must be 'serial', got '", method_name(schedule.method), "': ", reason.value_or(""));
  check_distances(schedule, num_partners(matmul));
  if (schedule.method == Method::kFlags) {
    check_argument(schedule.depth == 1, "depth", "1 for method 'flags'", schedule.depth);
    check_argument(schedule.sms_left == 0, "sms_left", "0 for method 'flags', whose copies need no multiprocessors",
                   schedule.sms_left);
    const std::optional<std::string> why = why_no_flags(matmul, schedule.chunks);
    check_user(!why, "method must be one of serial, ring, collective, got 'flags': ", why.value_or(""));
  }
  if (schedule.method == Method::kRing && !has_ring(matmul)) {
    throw UserError(concat("method must be one of serial, collective, got 'ring': ", step_text(plan, 0),
                           " cannot be sent as messages"));
  }
}

}  // namespace shardwright
