#include "batch/batch_forecast.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "batch/layout_numbers.h"
#include "cost/cost.h"
#include "moves/step_counts.h"
#include "planning/memory_limit.h"

namespace shardwright {
namespace {

using Kind = BatchPlan::Kind;
using Rounds = std::vector<uint64_t>;  // a set of rounds, one bit per round of the plan
using RankPair = std::pair<Rank, Rank>;

// Returns the link between two ranks: topology.inside if they are on one node, else topology.between. Without
// nodes (ranks_per_node is 0), all ranks are on one node.
const Link& link_between(const Topology& topology, Rank a, Rank b) {
  const auto node = [&](Rank rank) {
    return topology.ranks_per_node == 0 ? 0 : to_int(rank) / topology.ranks_per_node;
  };
  return node(a) == node(b) ? topology.inside : topology.between;
}

// Returns, for each kind, the rounds in which items of the kind are sent.
std::vector<Rounds> rounds_of_kinds(const BatchPlan& plan) {
  std::vector<Rounds> rounds(plan.kinds().size(), Rounds((plan.num_rounds() + 63) / 64, 0));
  for (const int item : plan.order()) {
    Rounds& kind_rounds = rounds[plan.kind_of(item)];
    for (const ItemPiece& piece : plan.pieces(item)) kind_rounds[piece.round / 64] |= uint64_t{1} << piece.round % 64;
  }
  return rounds;
}

// Returns the number of rounds in a set.
int64_t count(const Rounds& rounds) {
  int64_t total = 0;
  for (const uint64_t word : rounds) total += std::popcount(word);
  return total;
}

// Adds the rounds of a set to the set `into`, which may have no words yet.
void merge(Rounds& into, const Rounds& rounds) {
  into.resize(rounds.size(), 0);
  for (size_t w = 0; w < rounds.size(); ++w) into[w] |= rounds[w];
}

// The bytes that one rank sends another, and the rounds in which it does.
struct LinkUse {
  int64_t bytes = 0;
  Rounds rounds;
};

// Returns the use of each link, by sender and receiver.
std::map<RankPair, LinkUse> uses_of(const BatchPlan& plan) {
  const std::vector<Rounds> rounds = rounds_of_kinds(plan);
  std::map<RankPair, LinkUse> uses;
  for (size_t k = 0; k < plan.kinds().size(); ++k) {
    const Kind& kind = plan.kinds()[k];
    const int64_t bytes = plan.wire_dtype(kind.item).size_bytes() * kind.num_items;
    for (const ItemLoad& load : kind.loads) {
      const Rank rank = plan.ranks()[load.rank];
      for (const auto& [peer, elements] : kind.exchange->message_sizes(rank, Direction::kReceive)) {
        LinkUse& use = uses[{peer, rank}];
        use.bytes += elements * bytes;
        merge(use.rounds, rounds[k]);
      }
    }
  }
  return uses;
}

// Returns the costs of a destination whose items have these kinds: one index into BatchPlan::kinds() for each item.
// Does not set first_round and last_round.
BatchForecast::OfDestination costs_of(const BatchPlan& plan, const std::vector<int>& kinds, const Topology& topology) {
  BatchForecast::OfDestination costs;
  std::map<Rank, int64_t> received;
  std::map<Rank, int64_t> receiving_ps;
  std::map<Rank, int64_t> sending_ps;
  for (const int k : kinds) {
    const Kind& kind = plan.kinds()[k];
    const int64_t bytes = plan.wire_dtype(kind.item).size_bytes();
    costs.kept_bytes += kind.exchange->total_needed_elements() * bytes;
    for (const ItemLoad& load : kind.loads) {
      const Rank rank = plan.ranks()[load.rank];
      for (const auto& [peer, elements] : kind.exchange->message_sizes(rank, Direction::kReceive)) {
        const int64_t message_bytes = elements * bytes;
        const int64_t ps = picoseconds_for(message_bytes, link_between(topology, peer, rank).ps_per_kib);
        received[rank] += message_bytes;
        receiving_ps[rank] = saturating_sum(receiving_ps[rank], ps);
        sending_ps[peer] = saturating_sum(sending_ps[peer], ps);
      }
    }
  }
  for (const auto& [rank, bytes] : received) {
    costs.received_bytes += bytes;
    costs.received_bytes_max = std::max(costs.received_bytes_max, bytes);
  }
  costs.kept_bytes -= costs.received_bytes;
  for (const auto* times : {&receiving_ps, &sending_ps}) {
    for (const auto& [rank, ps] : *times) costs.predicted_ps = std::max(costs.predicted_ps, ps);
  }
  return costs;
}

// Fills forecast.destinations.
void add_destinations(const BatchPlan& plan, const Topology& topology, BatchForecast& forecast) {
  std::vector<std::vector<int>> kinds(plan.batch().destinations.size());
  std::vector<std::pair<int, int>> rounds(kinds.size(), {plan.num_rounds(), -1});
  for (size_t i = 0; i < plan.batch().items.size(); ++i) {
    const auto item = static_cast<int>(i);
    const int destination = plan.batch().items[i].destination;
    kinds[destination].push_back(plan.kind_of(item));
    for (const ItemPiece& piece : plan.pieces(item)) {
      auto& [first, last] = rounds[destination];
      first = std::min(first, piece.round);
      last = std::max(last, piece.round);
    }
  }
  // Destinations of repeated layers have the same kinds.
  std::map<std::vector<int>, BatchForecast::OfDestination> known;
  for (size_t d = 0; d < kinds.size(); ++d) {
    const auto [found, is_new] = known.try_emplace(kinds[d]);
    if (is_new) found->second = costs_of(plan, kinds[d], topology);
    forecast.destinations.push_back(found->second);
    forecast.destinations.back().first_round = rounds[d].second < 0 ? -1 : rounds[d].first;
    forecast.destinations.back().last_round = rounds[d].second;
  }
}

// The load of one rank over all its links.
struct RankUse {
  int64_t latency_ps = 0;  // of received messages
  int64_t sending_ps = 0;
  int64_t receiving_ps = 0;
  int64_t bytes = 0;  // sent plus received
  Rounds rounds;
};

// Returns the predicted time of a rank, without reductions.
int64_t time_of(const RankUse& use, const BatchPlan& plan, const Topology& topology) {
  const int64_t rounds = count(use.rounds);
  const int64_t transfer_ps = std::max(use.sending_ps, use.receiving_ps);
  const int64_t copy_ps = picoseconds_for(use.bytes, topology.memory_ps_per_kib);
  const int64_t latency_ps = saturating_sum(use.latency_ps, saturating_product(rounds, topology.step_ps));
  if (plan.buckets() == 1) return saturating_sum(latency_ps, saturating_sum(transfer_ps, copy_ps));
  // Transfers and copies overlap, except that packing the first bucket and unpacking the last one overlap with no
  // transfer: about 1 / rounds of the shorter of transfer_ps and copy_ps is not hidden.
  const int64_t exposed_ps = std::min(transfer_ps, copy_ps) / std::max<int64_t>(rounds, 1);
  return saturating_sum(latency_ps, saturating_sum(std::max(transfer_ps, copy_ps), exposed_ps));
}

// Returns the time of one reduction with the slowest lowering.
int64_t reducing_time(const BatchReduction& reduction, const Topology& topology) {
  int64_t longest = 0;
  for (const Lowering& lowering : Lowering::all()) {
    const PlanOptions options{.lowering = lowering, .topology = topology};
    longest = std::max(
        longest, predicted_picoseconds(make_plan_within(reduction.before, reduction.after, options, std::nullopt)));
  }
  return longest;
}

// Returns the time of all reductions, one after the other.
int64_t reducing_time(const BatchPlan& plan, const Topology& topology) {
  LayoutNumbers layouts;
  std::map<std::pair<int, int>, int64_t> known;
  int64_t all = 0;
  for (const BatchReduction& reduction : plan.reductions()) {
    const auto [found, is_new] = known.try_emplace({layouts.of(reduction.before), layouts.of(reduction.after)}, 0);
    if (is_new) found->second = reducing_time(reduction, topology);
    all = saturating_sum(all, found->second);
  }
  return all;
}

}  // namespace

BatchForecast forecast(const BatchPlan& plan, const Topology& topology) {
  BatchForecast forecast;
  std::map<Rank, RankUse> ranks;
  for (const auto& [pair, use] : uses_of(plan)) {
    const auto& [from, to] = pair;
    const Link& link = link_between(topology, from, to);
    const int64_t messages = count(use.rounds);
    const int64_t moving = picoseconds_for(use.bytes, link.ps_per_kib);
    const int64_t latency = saturating_product(messages, link.message_ps);
    forecast.links.push_back({from, to, use.bytes, messages, saturating_sum(latency, moving)});
    RankUse& sender = ranks[from];
    RankUse& receiver = ranks[to];
    sender.sending_ps = saturating_sum(sender.sending_ps, moving);
    receiver.receiving_ps = saturating_sum(receiver.receiving_ps, moving);
    receiver.latency_ps = saturating_sum(receiver.latency_ps, latency);
    for (RankUse* rank : {&sender, &receiver}) {
      rank->bytes += use.bytes;
      merge(rank->rounds, use.rounds);
    }
  }
  for (const auto& [rank, use] : ranks) {
    forecast.predicted_ps = std::max(forecast.predicted_ps, time_of(use, plan, topology));
  }
  forecast.reducing_ps = reducing_time(plan, topology);
  forecast.predicted_ps = saturating_sum(forecast.predicted_ps, forecast.reducing_ps);
  add_destinations(plan, topology, forecast);
  return forecast;
}

}  // namespace shardwright
