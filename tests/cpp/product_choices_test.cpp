// Compares the chosen cuts of a product, and the move chosen to overlap with it, with brute force.
#include <gtest/gtest.h>

#include <set>

#include "moves/step_counts.h"
#include "products/product_choices.h"
#include "random_problem.h"
#include "search/make_plan.h"

namespace shardwright {
namespace {

// An independent implementation of all costs, for one weight without scales.
int64_t cost_of(const ProductProblem& problem, const AxisCuts& cuts) {
  const auto [operand, weight, result] = AxisLetters::parse(problem.axes[0]);
  const Mesh& mesh = problem.operand.mesh();
  const auto during = [&](const std::string& letters, const Layout& given, bool is_result) {
    std::vector<std::string> placements;
    for (const char cut : cuts) {
      const size_t dim = letters.find(cut);
      const bool is_due = is_result && cut != kNoAxis;
      placements.push_back(dim != std::string::npos ? concat("S(", dim, ")") : is_due ? "P" : "R");
    }
    return layout_on(given.mesh_ptr(), given.shape(), placements);
  };
  const auto move_ps = [&](const Layout& src, const Layout& dst) {
    return predicted_picoseconds(make_plan(src, dst, {.lowering = problem.context.lowering}));
  };
  int64_t total = move_ps(problem.operand, during(operand, problem.operand, false)) +
                  move_ps(problem.weights[0], during(weight, problem.weights[0], false)) +
                  move_ps(during(result, problem.results[0], true), problem.results[0]);
  const auto here = [&](char axis) {
    const std::string& letters = operand.find(axis) != std::string::npos ? operand : weight;
    int64_t size = (&letters == &operand ? problem.operand : problem.weights[0]).shape()[letters.find(axis)];
    for (int d = 0; d < mesh.ndim(); ++d) {
      if (cuts[d] == axis) size = (size + mesh.dim_size(d) - 1) / mesh.dim_size(d);
    }
    return size;
  };
  int64_t m = 1;
  int64_t n = 1;
  int64_t k = 1;
  for (const char axis : operand) (result.find(axis) != std::string::npos ? m : k) *= here(axis);
  for (const char axis : weight) n *= result.find(axis) != std::string::npos ? here(axis) : 1;
  return total + problem.context.gemm_model(problem.operand.dtype()).picoseconds(m, n, k, 1, 4);
}

// Returns all choices of one axis per mesh dim, or none. An axis qualifies if this mesh dim cuts some tensor along it.
std::vector<AxisCuts> all_cuts(const ProductProblem& problem) {
  const auto [operand, weight, result] = AxisLetters::parse(problem.axes[0]);
  std::vector<AxisCuts> all{""};
  for (int d = 0; d < problem.operand.mesh().ndim(); ++d) {
    std::vector<char> axes{kNoAxis};
    const auto add = [&](const std::string& letters, const Layout& layout) {
      const Placement& placement = layout.placements()[d];
      if (!placement.is_shard_like() || layout.mesh().dim_size(d) == 1) return;
      const char axis = letters[static_cast<size_t>(placement.dim)];
      if (std::find(axes.begin(), axes.end(), axis) == axes.end()) axes.push_back(axis);
    };
    add(operand, problem.operand);
    add(weight, problem.weights[0]);
    add(result, problem.results[0]);
    std::vector<AxisCuts> longer;
    for (const AxisCuts& cuts : all) {
      for (const char axis : axes) longer.push_back(cuts + axis);
    }
    all = std::move(longer);
  }
  return all;
}

TEST(ProductChoices, ChoosesTheCutsOfLeastPredictedTime) {
  PlanCache cache;
  std::set<AxisCuts> seen;
  for (unsigned seed = 0; seed < 300; ++seed) {
    RandomProblem source(seed + 10'000);
    ProductProblem& problem = *source.problem;
    if (problem.scaled_by != ScaledBy::kNothing) continue;
    problem.cuts.reset();
    AxisCuts best;
    std::optional<int64_t> least;
    for (const AxisCuts& cuts : all_cuts(problem)) {
      const int64_t cost = cost_of(problem, cuts);
      if (!least || cost < *least) best = cuts;  // the first of equal ones
      least = std::min(least.value_or(cost), cost);
    }
    EXPECT_EQ(choose_cuts(problem, MovePlanner(problem.context, cache)), best) << "seed " << seed;
    seen.insert(best);
  }
  EXPECT_GT(seen.size(), 5u);
}

TEST(ProductChoices, OverlapsTheLongestMoveThatCanBeChunked) {
  PlanCache cache;
  std::set<Lead> seen;
  for (unsigned seed = 0; seed < 300; ++seed) {
    RandomProblem source(seed + 20'000);
    const ProductProblem& problem = *source.problem;
    if (problem.weights.size() > 1 || problem.scaled_by != ScaledBy::kNothing) continue;
    const ProductPlan plan(problem, cache);
    const auto [operand, weight, result] = AxisLetters::parse(problem.axes[0]);
    const ProductLayouts& during = plan.layouts();
    const PlanOptions options{.lowering = problem.context.lowering};
    const Plan of_operand = make_plan(problem.operand, during.operand, options);
    const Plan of_weight = make_plan(problem.weights[0], during.weights[0], options);
    const Plan of_result = make_plan(during.results[0], problem.results[0], options);
    const Contraction axes = Contraction::parse(problem.axes[0]);
    const Contraction swapped = Contraction::parse(weight + "," + operand + "->" + result);
    const std::pair<Lead, Matmul> candidates[] = {
        {Lead::kOperand, GatherMatmul{of_operand, {{axes, during.weights[0]}}}},
        {Lead::kWeight, GatherMatmul{of_weight, {{swapped, during.operand}}}},
        {Lead::kResult, MatmulScatter{of_result, {{axes, during.operand, during.weights[0]}}}}};
    int64_t longest = -1;
    int64_t chosen = -1;
    for (const auto& [lead, matmul] : candidates) {
      if (why_only_serial(matmul)) continue;
      longest = std::max(longest, predicted_picoseconds(plan_of(matmul)));
      if (lead == plan.lead()) chosen = predicted_picoseconds(plan_of(matmul));
    }
    EXPECT_EQ(chosen, longest) << "seed " << seed << "\n" << plan.to_string(cache);
    seen.insert(plan.lead());
  }
  EXPECT_EQ(seen.size(), 3u);
}

}  // namespace
}  // namespace shardwright
