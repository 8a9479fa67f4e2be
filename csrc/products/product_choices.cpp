#include "products/product_choices.h"

#include <algorithm>

#include "cost/cost.h"
#include "moves/step_counts.h"
#include "products/product_layouts.h"
#include "products/timeline.h"
#include "support/error.h"

namespace shardwright {
namespace {

using AxisOptions = std::vector<std::string>;  // by mesh dim: the axes to try, as letters, and kNoAxis: "-sn"

// Returns, for each mesh dim, no cut and the axes along which operand, first weight and first result are cut there.
AxisOptions options_of(const ProductProblem& problem, const AxisLetters& letters) {
  AxisOptions options;
  const Mesh& mesh = problem.operand.mesh();
  for (int d = 0; d < mesh.ndim(); ++d) {
    std::string axes(1, kNoAxis);
    const std::pair<const std::string&, const Layout&> tensors[] = {
        {letters.operand, problem.operand}, {letters.weight, problem.weights[0]}, {letters.result, problem.results[0]}};
    for (const auto& [of, layout] : tensors) {
      const Placement& placement = layout.placements()[d];
      if (mesh.dim_size(d) == 1 || !placement.is_shard_like()) continue;
      const char axis = of[static_cast<size_t>(placement.dim)];
      if (axes.find(axis) == std::string::npos) axes.push_back(axis);
    }
    options.push_back(std::move(axes));
  }
  return options;
}

// Advances `choice`, for each mesh dim an index into its options, to the next combination; the last mesh dim changes
// fastest. Returns false after the last combination.
bool advance(std::vector<size_t>& choice, const AxisOptions& options) {
  for (size_t d = choice.size(); d-- > 0;) {
    if (++choice[d] < options[d].size()) return true;
    choice[d] = 0;
  }
  return false;
}

// Returns the predicted picoseconds of the first product on the rank with the largest parts.
int64_t product_ps(const ProductProblem& problem, const AxisLetters& letters, const AxisCuts& cuts,
                   const ProductContext& context) {
  AxisSizes sizes = sizes_of(letters.weight, problem.weights[0]);
  sizes.merge(sizes_of(letters.operand, problem.operand));
  for (size_t d = 0; d < cuts.size(); ++d) {
    if (cuts[d] == kNoAxis) continue;
    const int64_t parts = problem.operand.mesh().dim_size(static_cast<int>(d));
    sizes[cuts[d]] = (sizes[cuts[d]] + parts - 1) / parts;
  }
  int64_t m = 1;
  int64_t n = 1;
  int64_t k = 1;
  for (const char axis : letters.operand) (letters.weight.find(axis) == std::string::npos ? m : k) *= sizes[axis];
  for (const char axis : letters.weight) n *= letters.operand.find(axis) == std::string::npos ? sizes[axis] : 1;
  const DType& dtype = problem.operand.dtype();
  return context.gemm_model(dtype).picoseconds(m, n, k, 1, dtype.size_bytes());
}

// Returns the predicted picoseconds of the first product, of the moves of both operands before it, and of the result's
// move after it.
int64_t predicted_ps(const ProductProblem& problem, const AxisCuts& cuts, const MovePlanner& planner) {
  const AxisLetters letters = AxisLetters::parse(problem.axes[0]);
  const auto& [operand, weight, result] = letters;
  const Layout& result_layout = problem.results[0];
  const AxisLayouts layouts(problem.operand.mesh_ptr(), cuts,
                            {{operand, problem.operand}, {weight, problem.weights[0]}});
  const auto during = [&](const std::string& of, const Layout& layout, const std::string& operands = "") {
    return layouts.layout(of, sizes_of(of, layout), layout.dtype(), operands);
  };
  int64_t total = planner.predicted_ps(problem.operand, during(operand, problem.operand));
  total = saturating_sum(total, planner.predicted_ps(problem.weights[0], during(weight, problem.weights[0])));
  total = saturating_sum(total, planner.predicted_ps(during(result, result_layout, operand + weight), result_layout));
  return saturating_sum(total, product_ps(problem, letters, cuts, planner.context()));
}

}  // namespace

MovePlanner::MovePlanner(const ProductContext& context, PlanCache& cache)
    : context_(context),
      planning_(PlanningContext::make({.lowering = context.lowering, .topology = context.topology}, std::nullopt,
                                      context.pins)),
      cache_(cache) {}

Plan MovePlanner::plan(const Layout& src, const Layout& dst) const { return cache_.get({src, dst, planning_})->plan(); }

int64_t MovePlanner::predicted_ps(const Layout& src, const Layout& dst) const {
  return src == dst ? 0 : predicted_picoseconds(plan(src, dst));
}

AxisCuts choose_cuts(const ProductProblem& problem, const MovePlanner& planner) {
  const AxisOptions options = options_of(problem, AxisLetters::parse(problem.axes[0]));
  std::vector<size_t> choice(options.size(), 0);  // for each mesh dim, the index of the axis
  std::optional<std::pair<int64_t, AxisCuts>> best;
  do {
    AxisCuts cuts;
    for (size_t d = 0; d < choice.size(); ++d) cuts.push_back(options[d][choice[d]]);
    const int64_t cost = predicted_ps(problem, cuts, planner);
    if (!best || cost < best->first) best = {cost, std::move(cuts)};
  } while (advance(choice, options));
  return best->second;
}

bool communicates(const Matmul& matmul) {
  const std::vector<Step>& steps = plan_of(matmul).steps;
  return std::any_of(steps.begin(), steps.end(), [](const Step& step) { return !is_local(step.op); });
}

Schedule choose_schedule(const Matmul& matmul, const ScheduleRequest& request, const GemmModel& model,
                         bool is_request_binding) {
  const bool has_chunks = request.chunks.has_value() || !request.distances.empty();
  if ((!request.method && !has_chunks) || !communicates(matmul)) return choose_fastest(matmul, model, request.depth);
  const bool is_by_hand = !request.distances.empty() || (request.method && request.chunks);
  if (!is_by_hand) {
    std::optional<Prediction> best;
    for (Prediction& prediction : predictions(matmul, model, request.depth)) {
      const Schedule& schedule = prediction.schedule;
      const bool fits = (!request.method || *request.method == schedule.method) &&
                        (!request.chunks || (schedule.distances.empty() && *request.chunks == schedule.chunks));
      if (fits && (!best || prediction.total_ps < best->total_ps)) best = std::move(prediction);
    }
    if (best) return best->schedule;
    if (!is_request_binding) return choose_fastest(matmul, model, request.depth);
  }
  Schedule wanted{
      request.method.value_or(is_by_hand ? Method::kRing : Method::kCollective),
      request.distances.empty() ? request.chunks.value_or(1) : static_cast<int64_t>(request.distances.size()) + 1,
      request.distances, request.depth.value_or(1)};
  try {
    check(matmul, wanted);
  } catch (const UserError&) {
    if (is_request_binding) throw;
    return choose_fastest(matmul, model, request.depth);
  }
  return tuned_schedule(matmul, wanted, model, request.depth);
}

}  // namespace shardwright
