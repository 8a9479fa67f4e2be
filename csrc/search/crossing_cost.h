// The cost of crossings (moves from a layout on one mesh to a layout on another) under the objective of a search.
#pragma once

#include <functional>
#include <optional>
#include <utility>

#include "exchange/exchange_bound.h"
#include "exchange/grid_exchange.h"
#include "moves/step.h"
#include "search/options.h"
#include "search/search.h"

namespace shardwright {

// Computes costs with one set of options and one topology. Both must outlive the object.
class CrossingCost {
 public:
  CrossingCost(const PlanOptions& options, const Topology& topology) : options_(options), topology_(topology) {}

  bool is_for_time() const { return options_.objective == Objective::kTime; }

  // Returns the cost of a step, from its maxima over ranks and its predicted time in picoseconds.
  Cost of(const Step& step, const StepCounts& maxima, int64_t picoseconds) const;
  // Returns the cost of a step that is a crossing with the messages of `crossing`. If `maxima` are lower bounds, so is
  // the cost.
  Cost of(const Step& step, const GridExchange& crossing, const StepCounts& maxima) const;

  // Returns the cheaper of the crossings with ReplicaPolicy::kWholeMessages and ReplicaPolicy::kEvenBytes, and its
  // cost. Returns nullopt if lower bounds show that is_worth is false for both. So is_worth may also be false for the
  // returned cost. `is_worth(cost)` must be true exactly for costs below some limit. The layouts must have no partials.
  std::optional<std::pair<Step, Cost>> cheapest(
      const Layout& before, const Layout& after,
      const std::function<bool(const Cost&)>& is_worth = [](const Cost&) { return true; }) const;

 private:
  const PlanOptions& options_;
  const Topology& topology_;
};

// Returns a lower bound on the predicted time of every plan between two layouts, in picoseconds. It is the sum of the
// latency of one step and one message on the fastest link, the copy of the result, and the larger of two transfer
// times: of the bytes that some rank must receive or send, and of the bytes that must enter or leave some node, divided
// by the node's number of ranks. If no rank must receive anything, it is the copy alone.
int64_t least_picoseconds_between(const Layout& src, const Layout& dst, const Topology& topology);
// Returns the same bound for plans to `dst` whose traffic has these bounds.
int64_t least_picoseconds_for(const ExchangeBound& bound, const Layout& dst, const Topology& topology);

}  // namespace shardwright
