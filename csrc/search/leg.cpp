#include "search/leg.h"

#include "moves/step_counts.h"
#include "search/crossing_cost.h"

namespace shardwright {

void Leg::find_steps(const PlanOptions& options, const Topology& topology) {
  if (steps) return;
  steps.emplace();
  if (!(from == to)) steps = cheapest_moves(from, to, options, topology);
  cost_bound = {};
  for (const Step& step : *steps) {
    const StepCounts maxima = step_counts(step, options.lowering);
    sent_bytes += maxima.sent_bytes;
    received_bytes += maxima.received_bytes;
    const int64_t picoseconds = predicted_picoseconds(step, maxima, topology);
    cost_bound = cost_bound + CrossingCost(options, topology).of(step, maxima, picoseconds);
  }
}

void add_leg(std::vector<Leg>& legs, const Layout& layout, const Layout& from, const Layout& to,
             const PlanOptions& options, const Topology& topology) {
  const int64_t elements = layout.largest_part_elements();
  if (!legs.empty() && options.max_held > 0 && elements > options.max_held) return;
  for (const Leg& known : legs) {
    if (known.layout == layout) return;
  }
  const int64_t least = from == to ? 0 : least_first_cost(from, to, options, topology);
  legs.push_back({layout, from, to, elements, {least, 0, 0, 0}, std::nullopt});
}

}  // namespace shardwright
