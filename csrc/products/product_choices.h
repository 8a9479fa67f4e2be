// What is chosen for a product: the plans of its moves, the axes that are cut while it computes, and how the programs
// that hold its products are carried out. Integers throughout, so that all ranks choose alike.
#pragma once

#include "planning/plan_cache.h"
#include "products/product_problem.h"

namespace shardwright {

// Plans moves by a context, with the help of the cache: those that are pinned, else the cheapest.
class MovePlanner {
 public:
  MovePlanner(const ProductContext& context, PlanCache& cache);

  Plan plan(const Layout& src, const Layout& dst) const;
  // Nothing where the two are equal.
  int64_t predicted_ps(const Layout& src, const Layout& dst) const;
  const ProductContext& context() const { return context_; }

 private:
  const ProductContext& context_;
  ContextPtr planning_;
  PlanCache& cache_;
};

// The cuts with the least predicted time for all moves of operand, first weight and its result, and for the product
// itself. Tried along each mesh dim are none, and the axes that these tensors are cut along there; of equals the one
// tried first, with later mesh dims changing faster.
AxisCuts choose_cuts(const ProductProblem& problem, const MovePlanner& planner);

// The schedule that is predicted fastest of those that the request allows; any, where nothing is moved between ranks.
// With `must`, a request that cannot be met throws UserError; else the choice is free then.
Schedule choose_schedule(const Matmul& matmul, const ScheduleRequest& request, const GemmModel& model, bool must);

// Whether its plan moves anything between ranks.
bool communicates(const Matmul& matmul);

}  // namespace shardwright
