// The cost of crossings under the objective of a search.
#pragma once

#include <functional>
#include <optional>
#include <utility>

#include "exchange/grid_exchange.h"
#include "moves/step.h"
#include "search/options.h"
#include "search/search.h"

namespace shardwright {

class CrossingCost {
 public:
  CrossingCost(const PlanOptions& options, const Topology& topology) : options_(options), topology_(topology) {}

  bool is_for_time() const { return options_.objective == Objective::kTime; }

  // Returns the cost of a step of any kind, from what its worst ranks do and its predicted time.
  Cost of(const Step& step, const StepFigures& worst, int64_t picoseconds) const;
  // Returns the cost of a crossing, whose figures may be lower bounds; then so is the cost.
  Cost of(const Step& step, const GridExchange& crossing, const StepFigures& worst) const;

  // Returns the crossing between two layouts in whole messages or to the element, whichever costs less; nullopt if
  // is_worth(cost), which is true of all costs below some limit, can be true of neither.
  std::optional<std::pair<Step, Cost>> cheapest(
      const Layout& before, const Layout& after,
      const std::function<bool(const Cost&)>& is_worth = [](const Cost&) { return true; }) const;

 private:
  const PlanOptions& options_;
  const Topology& topology_;
};

}  // namespace shardwright
