#include "search/crossing_cost.h"

#include <algorithm>

#include "exchange/bounds.h"
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

int64_t least_picoseconds_between(const Layout& src, const Layout& dst, const Topology& topology) {
  return least_picoseconds_for(exchange_bound(src, dst, topology.ranks_per_node), dst, topology);
}

int64_t least_picoseconds_for(const ExchangeBound& bound, const Layout& dst, const Topology& topology) {
  const int64_t copies = picoseconds_for(dst.largest_part_bytes(), topology.memory_ps_per_kib);
  if (bound.received_bytes_sum == 0) return copies;
  const auto faster = [](const Link& a, const Link& b) {
    return Link{std::min(a.message_ps, b.message_ps), std::min(a.ps_per_kib, b.ps_per_kib)};
  };
  Link between = topology.between;
  for (const auto& [mesh_dim, link] : topology.mesh_dims) between = faster(between, link);
  const Link any = faster(between, topology.inside);
  const int64_t message = bound.node_bytes_max > 0 ? between.message_ps : any.message_ps;
  const int64_t bytes = std::max(bound.received_bytes_max, bound.any_sent_bytes_max);
  const int64_t bytes_between_nodes = std::max(bound.node_bytes_per_rank, bound.leaving_bytes_per_rank);
  // A plan in segments keeps links within nodes and links between nodes busy at the same time.
  const bool has_nodes = topology.ranks_per_node > 0 || !topology.mesh_dims.empty();
  const int64_t both = topology.inside.ps_per_kib + between.ps_per_kib;
  const __int128 product = static_cast<__int128>(topology.inside.ps_per_kib) * between.ps_per_kib;  // up to 2^80
  const int64_t ps_per_kib = has_nodes && both > 0 ? static_cast<int64_t>(product / both) : topology.inside.ps_per_kib;
  const int64_t wire =
      std::max(picoseconds_for(bytes, ps_per_kib), picoseconds_for(bytes_between_nodes, between.ps_per_kib));
  return saturating_sum(saturating_sum(topology.step_ps, message), saturating_sum(wire, copies));
}

}  // namespace shardwright
