#include "search/crossing_cost.h"

#include <algorithm>

#include "moves/step_counts.h"
#include "moves/step_exchange.h"

namespace shardwright {

Cost CrossingCost::of(const Step& step, const StepCounts& maxima, int64_t picoseconds) const {
  const bool communicates = step.op == StepOp::kCross ? maxima.messages > 0 : !is_local(step.op);
  return {is_for_time() ? picoseconds : maxima.received_bytes, communicates ? 1 : 0, maxima.messages, 1};
}

Cost CrossingCost::of(const Step& step, const GridExchange& crossing, const StepCounts& maxima) const {
  const Link link = link_of(crossing, topology_);
  return of(step, maxima, predicted_picoseconds(maxima.messages == 0, maxima, link, topology_));
}

std::optional<std::pair<Step, Cost>> CrossingCost::cheapest(const Layout& before, const Layout& after,
                                                            const std::function<bool(const Cost&)>& is_worth) const {
  Step step{StepOp::kCross, {}, before, after, ReplicaPolicy::kWholeMessages};
  const GridExchange whole_messages = crossing_of(step);
  const GridExchange even_bytes = whole_messages.with_policy(ReplicaPolicy::kEvenBytes);
  const StepCounts least = whole_messages.maxima_lower_bound();  // lower bounds for both policies
  if (!is_worth(of(step, whole_messages, least)) && !is_worth(of(step, even_bytes, least))) return std::nullopt;
  const StepCounts maxima = whole_messages.totals().maxima;
  const Cost whole_messages_cost = of(step, whole_messages, maxima);
  if (maxima.sent_bytes <= maxima.received_bytes) return std::pair(std::move(step), whole_messages_cost);
  const Cost even_bytes_cost = of(step, even_bytes, even_bytes.totals().maxima);
  if (even_bytes_cost < whole_messages_cost) step.policy = ReplicaPolicy::kEvenBytes;
  return std::pair(std::move(step), std::min(whole_messages_cost, even_bytes_cost));
}

}  // namespace shardwright
