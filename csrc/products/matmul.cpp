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

const Step* chunked_step(const Matmul& matmul) {
  const Plan& plan = plan_of(matmul);
  if (plan.steps.empty()) return nullptr;
  return std::holds_alternative<GatherMatmul>(matmul) ? &plan.steps.back() : &plan.steps.front();
}

int64_t size_of_axis(const std::vector<int>& dims, const Layout& layout, int axis) {
  return layout.shape()[std::find(dims.begin(), dims.end(), axis) - dims.begin()];
}

// Checks that both tensors have the axis with the same size and the same cuts.
void check_axis(int axis, const std::vector<int>& a_dims, const Layout& a, const std::vector<int>& b_dims,
                const Layout& b) {
  const auto dim_in = [&](const std::vector<int>& dims) {
    return static_cast<int>(std::find(dims.begin(), dims.end(), axis) - dims.begin());
  };
  check_user(size_of_axis(a_dims, a, axis) == size_of_axis(b_dims, b, axis), "matmul: an axis has ",
             size_of_axis(a_dims, a, axis), " elements in ", a, " and ", size_of_axis(b_dims, b, axis), " in ", b);
  check_user(a.cuts(dim_in(a_dims)) == b.cuts(dim_in(b_dims)), "matmul: an axis is cut differently in ", a, " and in ",
             b);
}

void check_dtypes(const Layout& lhs, const Layout& rhs, const std::optional<Scaling>& scaling) {
  if (!scaling) {
    check_user(lhs.dtype() == rhs.dtype(), "matmul: ", lhs, " and ", rhs, " are of different dtypes");
    check_user(lhs.dtype().kind() == DTypeKind::kFloat, "dtype: ", lhs.dtype().name(),
               " has no matrix products here without scales; allowed are floating dtypes");
    return;
  }
  const bool are_both_e5m2 = lhs.dtype() == DType::kFloat8E5M2 && rhs.dtype() == DType::kFloat8E5M2;
  check_user(takes_scales(lhs.dtype()) && takes_scales(rhs.dtype()) && !are_both_e5m2, "dtype: ", lhs.dtype().name(),
             " and ", rhs.dtype().name(),
             " are given with scales; allowed are float8_e4m3fn and float8_e5m2, not float8_e5m2 twice");
  const DType result = scaling->result;
  check_user(is_scaled_result(result), "out_dtype: ", result.name(), "; allowed with scales are bfloat16 and float32");
}

void check_operands(const Contraction& axes, const Layout& lhs, const Layout& rhs, const Layout& any,
                    const std::optional<Scaling>& scaling) {
  check_user(axes.lhs.size() == lhs.shape().size() && axes.rhs.size() == rhs.shape().size(), "contraction: ", axes,
             " does not fit ", lhs, " and ", rhs);
  check_user(lhs.mesh() == any.mesh() && rhs.mesh() == any.mesh(), "matmul: ", lhs, " and ", rhs,
             " lie on different meshes");
  check_dtypes(lhs, rhs, scaling);
  for (const int axis : axes.lhs) {
    if (axes.is_summed(axis)) check_axis(axis, axes.lhs, lhs, axes.rhs, rhs);
  }
}

// Checks that scales of the moved operand's rows are placed and moved like the rows.
void check_scales(const GatherMatmul& matmul) {
  const Scaling& scaling = *matmul.scaling;
  std::vector<int> free_dims;
  for (size_t j = 0; j < matmul.products.size(); ++j) {
    const auto& product = matmul.products[j];
    const std::vector<int> dims = free_dims_of(product.axes, product.axes.lhs);
    check_user(j == 0 || dims == free_dims, "products: ", product.axes, " sums over other dims than ",
               matmul.products[0].axes, "; allowed with scales are the same");
    check_user(!product.has_bias, "bias: is not added to scaled operands; add it to the result");
    free_dims = dims;
  }
  check_user(scaling.by_row == scaling.plan.has_value(), "scales: ", scaling.by_row ? "of rows without" : "with",
             " a plan of their own; allowed are scales of rows with one and others without");
  if (!scaling.by_row) return;
  const auto check_side = [&](const Layout& scales, const Layout& operand) {
    bool fits = scales.dtype() == DType::kFloat32 && scales.mesh() == operand.mesh() &&
                scales.shape().size() == free_dims.size();
    for (size_t i = 0; fits && i < free_dims.size(); ++i) {
      fits = scales.shape()[i] == operand.shape()[free_dims[i]] &&
             scales.cuts(static_cast<int>(i)) == operand.cuts(free_dims[i]);
    }
    check_user(fits, "scales: ", scales, " of the rows of ", operand, "; allowed are float32, cut as these are");
  };
  check_side(scaling.plan->src, matmul.plan.src);
  check_side(scaling.plan->dst, matmul.plan.dst);
}

void check_kind(const GatherMatmul& matmul) {
  check_user(!matmul.products.empty(), "products: there are none; allowed is one or more");
  for (const auto& product : matmul.products) {
    check_operands(product.axes, matmul.plan.dst, product.other, matmul.plan.dst, matmul.scaling);
    check_user(!product.has_bias || !product.axes.out.empty(), "bias: given for a result without dims");
  }
  check_user(matmul.plan.dst.partial_dims().empty(), "operand: is multiplied while reductions are due (",
             matmul.plan.dst, "); allowed is a layout of S and R");
  if (matmul.scaling) check_scales(matmul);
}

void check_kind(const MatmulScatter& matmul) {
  check_user(!matmul.terms.empty(), "terms: there are none; allowed is one or more");
  const Layout& result = matmul.plan.src;
  const DType& dtype = matmul.scaling ? matmul.scaling->result : matmul.terms[0].lhs.dtype();
  check_user(result.dtype() == dtype, "matmul: the product is of ", dtype.name(), ", the result, ", result, ", is not");
  check_user(!matmul.scaling || !matmul.scaling->plan, "scales: with a plan of their own; allowed with operands that ",
             "stay is none");
  for (const auto& term : matmul.terms) {
    check_operands(term.axes, term.lhs, term.rhs, result, matmul.scaling);
    check_user(term.axes.out.size() == result.shape().size(), "contraction: ", term.axes, " does not fit the result, ",
               result);
    for (const int axis : term.axes.out) {
      const bool is_in_lhs = has_axis(term.axes.lhs, axis);
      check_axis(axis, is_in_lhs ? term.axes.lhs : term.axes.rhs, is_in_lhs ? term.lhs : term.rhs, term.axes.out,
                 result);
    }
  }
}

void check_distances(const Schedule& schedule, int64_t partners) {
  if (schedule.distances.empty()) return;
  check_user(schedule.method == Method::kRing, "chunks: distances (", chunks_text(schedule),
             ") are for method 'ring', not '", method_name(schedule.method), "'");
  std::vector<int64_t> said;
  for (const std::vector<int64_t>& chunk : schedule.distances) said.insert(said.end(), chunk.begin(), chunk.end());
  std::sort(said.begin(), said.end());
  bool is_all = static_cast<int64_t>(said.size()) == partners - 1;
  for (size_t i = 0; i < said.size() && is_all; ++i) is_all = said[i] == static_cast<int64_t>(i) + 1;
  check_user(is_all, "chunks: distances ", chunks_text(schedule), " for ", partners,
             " ranks; allowed is each from 1 to ", partners - 1, " once");
}

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
  throw UserError(concat("method: '", name, "'; allowed are 'serial', 'ring', 'collective' and 'flags'"));
}

namespace {

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
  const std::string what = concat(where, " is a ", step_op_name(step->op));
  if (is_local(step->op)) return what + ", which moves nothing";
  const bool reduces = step->op == StepOp::kReduceScatter || step->op == StepOp::kAllReduce;
  if (gathers && reduces) return what + ", whose sums must be there before they are multiplied";
  if (step->sharing != Sharing::kNone) return what + " whose sending replicas share";
  if (step->rounds > 1) return what + " in rounds, to keep to a memory limit";
  if (!gathers && reduces && plan_of(matmul).src.dtype().kind() != DTypeKind::kFloat) return what + " of integers";
  return std::nullopt;
}

void check(const Matmul& matmul, const Schedule& schedule) {
  const Plan& plan = plan_of(matmul);
  check_user(schedule.chunks >= 1 && schedule.chunks <= kMaxChunks, "chunks: ", schedule.chunks, "; allowed are 1 to ",
             kMaxChunks);
  check_user(schedule.depth >= 1 && schedule.depth <= kMaxChunks, "depth: ", schedule.depth, "; allowed are 1 to ",
             kMaxChunks, " transfers under way alongside a product");
  check_user(schedule.sms_left >= 0 && schedule.sms_left <= kMaxSmsLeft, "sms_left: ", schedule.sms_left,
             "; allowed are 0 to ", kMaxSmsLeft);
  std::visit([](const auto& m) { check_kind(m); }, matmul);
  if (schedule.method == Method::kSerial) {
    check_user(schedule.depth == 1 && schedule.sms_left == 0, "method: 'serial' with depth ", schedule.depth, " and ",
               schedule.sms_left, " multiprocessors left to transfers, which no product runs alongside; allowed ",
               "are depth 1 and 0");
    return;
  }
  const std::optional<std::string> reason = why_only_serial(matmul);
  check_user(!reason, "method: '", method_name(schedule.method), "', but ", reason.value_or(""),
             "; allowed is 'serial'");
  check_distances(schedule, num_partners(matmul));
  if (schedule.method == Method::kFlags) {
    check_user(schedule.depth == 1 && schedule.sms_left == 0, "method: 'flags' with depth ", schedule.depth, " and ",
               schedule.sms_left, " multiprocessors left to transfers, which are copied by none; allowed are 1 and 0");
    const std::optional<std::string> why = why_no_flags(matmul, schedule.chunks);
    check_user(!why, "method: 'flags', but ", why.value_or(""), "; allowed are 'serial', 'ring' and 'collective'");
  }
  if (schedule.method == Method::kRing && !has_ring(matmul)) {
    throw UserError(concat("method: 'ring', but ", step_text(plan, 0),
                           " is carried out by collectives; allowed are 'collective' and 'serial'"));
  }
}

}  // namespace shardwright
