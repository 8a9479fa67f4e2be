// Chooses the plans of a product's moves, the axes that are cut while it computes, and the schedules of the programs
// that hold its products. All costs are integers, so all ranks make the same choice.
#pragma once

#include "planning/plan_cache.h"
#include "products/product_problem.h"

namespace shardwright {

// Plans moves in a product's context, through the cache. A plan is the pinned one if there is one, else the cheapest.
class MovePlanner {
 public:
  // Both arguments must outlive the planner.
  MovePlanner(const ProductContext& context, PlanCache& cache);

  // Throws as PlanCache::get does.
  Plan plan(const Layout& src, const Layout& dst) const;
  // Returns the predicted picoseconds of plan(src, dst); 0 if the two layouts are equal.
  int64_t predicted_ps(const Layout& src, const Layout& dst) const;
  const ProductContext& context() const { return context_; }

 private:
  const ProductContext& context_;
  ContextPtr planning_;
  PlanCache& cache_;
};

// Returns the cuts with the least predicted time for the product and for all moves of the operand, the first weight and
// the first result. The candidates are all combinations of: along each mesh dim, no cut or an axis that the mesh dim
// cuts in one of these three tensors. Mesh dims of size 1 cut none. Of candidates with equal times, the first one tried
// is returned; the last mesh dim changes fastest. Throws UserError if the context lacks the GEMM model of the dtype.
//
//   "bsk,nk->bsn" on (dp, tp), operand [S(0), S(1)], weight [R, S(0)], result [S(0), S(2)]:
//     along dp: no cut, or b (operand and result); along tp: no cut, s (operand), or n (weight and result)
//     tried: "--", "-s", "-n", "b-", "bs", "bn". With "bn", only the operand moves: its shards of s are gathered.
AxisCuts choose_cuts(const ProductProblem& problem, const MovePlanner& planner);

// Returns the schedule that is predicted to be fastest among the schedules that the request allows. If nothing moves
// between ranks, ignores the requested method, chunks and distances. If the product cannot meet the request, throws
// UserError if `is_request_binding`; otherwise ignores the requested method, chunks and distances, but not the depth.
Schedule choose_schedule(const Matmul& matmul, const ScheduleRequest& request, const GemmModel& model,
                         bool is_request_binding);

// Returns true if the matmul's plan moves anything between ranks.
bool communicates(const Matmul& matmul);

}  // namespace shardwright
