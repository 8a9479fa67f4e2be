#include "batch/batch_certificate.h"

#include <algorithm>
#include <bit>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "batch/layout_numbers.h"
#include "cost/lowering.h"
#include "exchange/load.h"
#include "planning/certified_plan.h"
#include "planning/memory_limit.h"
#include "support/ceil_divide.h"
#include "support/error.h"
#include "support/text.h"

namespace shardwright {
namespace {

using Kind = BatchPlan::Kind;

// Returns the size of one element of a kind in the dtype in which it is sent.
int64_t element_bytes(const BatchPlan& plan, const Kind& kind) { return plan.wire_dtype(kind.item).size_bytes(); }

// Sets received_bytes_max, received_bytes_sum, kept_bytes_sum, sent_bytes_max and rounds_bound.
void count_bytes(const BatchPlan& plan, BatchCertificate& certificate) {
  std::vector<int64_t> received(plan.ranks().size(), 0);
  std::vector<int64_t> sent(plan.ranks().size(), 0);
  for (const Kind& kind : plan.kinds()) {
    const int64_t bytes = element_bytes(plan, kind) * kind.num_items;
    int64_t received_elements = 0;
    for (const ItemLoad& load : kind.loads) {
      const Rank rank = plan.ranks()[load.rank];
      received[load.rank] += kind.exchange->num_elements(rank, Direction::kReceive) * bytes;
      sent[load.rank] += kind.exchange->num_elements(rank, Direction::kSend) * bytes;
      received_elements += kind.exchange->num_elements(rank, Direction::kReceive);
    }
    certificate.received_bytes_sum += received_elements * bytes;
    certificate.kept_bytes_sum += (kind.exchange->total_needed_elements() - received_elements) * bytes;
  }
  int64_t busiest = 0;
  for (size_t r = 0; r < received.size(); ++r) {
    certificate.received_bytes_max = std::max(certificate.received_bytes_max, received[r]);
    certificate.sent_bytes_max = std::max(certificate.sent_bytes_max, sent[r]);
    busiest = std::max(busiest, received[r] + sent[r]);
  }
  certificate.rounds_bound = ceil_divide(busiest, plan.batch().bucket_bytes);
}

// The bytes that all receivers together need, divided by the set of candidate senders that hold them.
struct Demand {
  std::map<std::vector<Rank>, int64_t> by_senders;
  bool is_complete = true;  // false if exchanges that do not report their demand were left out
};

// Returns the demand of all items.
Demand demand_of(const BatchPlan& plan) {
  Demand demand;
  for (const Kind& kind : plan.kinds()) {
    const auto kind_demand = kind.exchange->demand();
    if (!kind_demand) {
      demand.is_complete = false;
      continue;
    }
    for (const auto& [senders, elements] : *kind_demand) {
      demand.by_senders[senders] += elements * element_bytes(plan, kind) * kind.num_items;
    }
  }
  return demand;
}

// Sets sent_bound_is_exact, and sets sent_bytes_bound to the least possible load of the busiest sender, or to a weaker
// bound if sent_bound_is_exact is false. Reads received_bytes_sum. In the terms of exchange/load.h, the bytes that
// receivers need from one set of candidate senders are a job, and this set is the pool of the job. Ranks that are in
// exactly the same sets form a team.
//
//   12 bytes from ranks 0 or 1, 6 bytes from ranks 1 or 2: each rank is a team of its own, because only rank 1 is in
//   both sets. Ranks 0 and 1 can each send 6 bytes of the first job, and rank 2 all 6 of the second: the bound is 6.
void bound_sent(const BatchPlan& plan, BatchCertificate& certificate) {
  const Demand demand = demand_of(plan);
  const std::map<std::vector<Rank>, int64_t>& bytes_by_senders = demand.by_senders;
  const bool is_small = static_cast<int64_t>(bytes_by_senders.size()) <= BatchCertificate::kMaxPools;
  certificate.sent_bound_is_exact = demand.is_complete && is_small;
  if (!demand.is_complete) {  // weaker bound: all source ranks send equal shares
    std::set<Rank> sources;
    for (const Layout& layout : plan.batch().sources) {
      for (const Rank rank : layout.mesh().ranks()) sources.insert(rank);
    }
    certificate.sent_bytes_bound =
        ceil_divide(certificate.received_bytes_sum, std::max<int64_t>(static_cast<int64_t>(sources.size()), 1));
  }
  if (!is_small) {  // weaker bound: the candidate senders of each job send equal shares
    for (const auto& [senders, bytes] : bytes_by_senders) {
      const int64_t per_sender = ceil_divide(bytes, static_cast<int64_t>(senders.size()));
      certificate.sent_bytes_bound = std::max(certificate.sent_bytes_bound, per_sender);
    }
    return;
  }
  std::map<Rank, std::vector<int>> pools_of;
  SharedWork work;
  for (const auto& [senders, bytes] : bytes_by_senders) {
    const auto pool = static_cast<int>(work.jobs.size());
    work.jobs.push_back({bytes, {pool}});
    for (const Rank rank : senders) pools_of[rank].push_back(pool);
  }
  work.pools.resize(work.jobs.size());
  std::map<std::vector<int>, int> teams;
  for (const auto& [rank, pools] : pools_of) {
    const auto [found, is_new] = teams.try_emplace(pools, static_cast<int>(teams.size()));
    if (is_new) {
      work.team_sizes.push_back(0);
      for (const int pool : pools) work.pools[pool].push_back(found->second);
    }
    ++work.team_sizes[found->second];
  }
  certificate.sent_bytes_bound = std::max(certificate.sent_bytes_bound, min_max_load(work).rounded_up());
}

// The rounds in which items of a kind are sent, as whole items or in pieces.
struct KindRounds {
  std::vector<uint64_t> unsplit_rounds;  // one bit per round, for unsplit items
  std::vector<ItemPiece> pieces;         // of all items that are split
};

// The message that every item of a kind has from one rank to another.
struct Flow {
  Rank from{};
  Rank to{};
  int kind = 0;  // index into BatchPlan::kinds()
  int64_t elements = 0;
};

// Returns the rounds of each kind, by index into BatchPlan::kinds().
std::vector<KindRounds> rounds_by_kind(const BatchPlan& plan) {
  std::vector<KindRounds> rounds_of_kinds(plan.kinds().size());
  for (KindRounds& kind_rounds : rounds_of_kinds) kind_rounds.unsplit_rounds.resize((plan.num_rounds() + 63) / 64, 0);
  for (const int item : plan.order()) {
    KindRounds& kind_rounds = rounds_of_kinds[plan.kind_of(item)];
    for (const ItemPiece& piece : plan.pieces(item)) {
      if (piece.begin == 0 && piece.end == ItemPiece::kWhole) {
        kind_rounds.unsplit_rounds[piece.round / 64] |= uint64_t{1} << piece.round % 64;
      } else {
        kind_rounds.pieces.push_back(piece);
      }
    }
  }
  return rounds_of_kinds;
}

// Returns the flows of all kinds, by ascending receiver, then sender.
std::vector<Flow> flows_of(const BatchPlan& plan) {
  std::vector<Flow> flows;
  for (size_t k = 0; k < plan.kinds().size(); ++k) {
    const Kind& kind = plan.kinds()[k];
    for (const ItemLoad& load : kind.loads) {
      const Rank rank = plan.ranks()[load.rank];
      for (const auto& [peer, elements] : kind.exchange->message_sizes(rank, Direction::kReceive)) {
        flows.push_back({peer, rank, static_cast<int>(k), elements});
      }
    }
  }
  std::sort(flows.begin(), flows.end(),
            [](const Flow& a, const Flow& b) { return std::pair(a.to, a.from) < std::pair(b.to, b.from); });
  return flows;
}

// Sets messages_max, messages_sum and messages_are_exact. With at most kMaxItemMessages flows, counts for each pair of
// ranks the rounds in which any flow between them has elements. With more flows, counts the messages of every item
// separately, and caps the count of a rank at one message per round from each other rank. Reads ranks and rounds.
void count_messages(const BatchPlan& plan, BatchCertificate& certificate) {
  const std::vector<KindRounds> rounds_of_kinds = rounds_by_kind(plan);
  int64_t item_messages = 0;
  std::vector<int64_t> message_bounds(plan.ranks().size(), 0);
  for (size_t k = 0; k < rounds_of_kinds.size(); ++k) {
    auto rounds = static_cast<int64_t>(rounds_of_kinds[k].pieces.size());
    for (const uint64_t word : rounds_of_kinds[k].unsplit_rounds) rounds += std::popcount(word);
    for (const ItemLoad& load : plan.kinds()[k].loads) {
      const Rank rank = plan.ranks()[load.rank];
      const int64_t received = plan.kinds()[k].exchange->messages_at_most(rank, Direction::kReceive);
      item_messages += received;
      message_bounds[load.rank] += received * rounds;
    }
  }
  certificate.messages_are_exact = item_messages <= BatchCertificate::kMaxItemMessages;
  if (!certificate.messages_are_exact) {
    const int64_t from_all = (certificate.ranks - 1) * certificate.rounds;
    for (const int64_t messages : message_bounds) {
      certificate.messages_max = std::max(certificate.messages_max, std::min(messages, from_all));
      certificate.messages_sum += std::min(messages, from_all);
    }
    return;
  }
  const std::vector<Flow> flows = flows_of(plan);
  std::map<Rank, int64_t> received;
  std::vector<uint64_t> rounds;
  for (size_t i = 0; i < flows.size();) {
    rounds.assign((plan.num_rounds() + 63) / 64, 0);
    const Flow& first = flows[i];
    for (; i < flows.size() && flows[i].from == first.from && flows[i].to == first.to; ++i) {
      const KindRounds& kind_rounds = rounds_of_kinds[flows[i].kind];
      for (size_t w = 0; w < rounds.size(); ++w) rounds[w] |= kind_rounds.unsplit_rounds[w];
      for (const ItemPiece& piece : kind_rounds.pieces) {
        const bool is_empty =
            ItemPiece::before(piece.begin, flows[i].elements) == ItemPiece::before(piece.end, flows[i].elements);
        if (!is_empty) rounds[piece.round / 64] |= uint64_t{1} << piece.round % 64;
      }
    }
    for (const uint64_t word : rounds) received[first.to] += std::popcount(word);
  }
  for (const auto& [rank, messages] : received) {
    certificate.messages_sum += messages;
    certificate.messages_max = std::max(certificate.messages_max, messages);
  }
}

// The costs of a reduction. Each cost is the maximum over all lowerings.
struct ReductionCosts {
  int64_t received_bytes = 0;   // by all ranks
  int64_t temporary_bytes = 0;  // peak memory of the worst rank, less the largest part of the result
};

// Returns the costs of a reduction.
ReductionCosts costs_of(const BatchReduction& reduction) {
  ReductionCosts costs;
  for (const Lowering& lowering : Lowering::all()) {
    PlanOptions options;
    options.lowering = lowering;
    const CertifiedPlan plan(make_plan_within(reduction.before, reduction.after, options, std::nullopt));
    costs.received_bytes = std::max(costs.received_bytes, plan.traffic().received_bytes_sum);
    costs.temporary_bytes = std::max(costs.temporary_bytes, plan.peak_bytes() - reduction.after.largest_part_bytes());
  }
  return costs;
}

// Sets reductions, reduction_bytes_sum, reduced_bytes_max, reducing_bytes_max and memory_bytes. Computes the costs once
// for each pair of layouts.
void count_reductions(const BatchPlan& plan, BatchCertificate& certificate) {
  LayoutNumbers layouts;
  std::map<std::pair<int, int>, ReductionCosts> known;
  // By number of the reduced layout: the number of sources with this layout, and the layout.
  std::map<int, int64_t> num_sources;
  std::map<int, const Layout*> reduced;
  for (const BatchReduction& reduction : plan.reductions()) {
    const int after = layouts.of(reduction.after);
    const auto [found, is_new] = known.try_emplace({layouts.of(reduction.before), after});
    if (is_new) found->second = costs_of(reduction);
    certificate.reduction_bytes_sum += found->second.received_bytes;
    certificate.reducing_bytes_max = std::max(certificate.reducing_bytes_max, found->second.temporary_bytes);
    reduced[after] = &reduction.after;
    ++num_sources[after];
  }
  certificate.reductions = static_cast<int64_t>(plan.reductions().size());
  for (const Rank rank : plan.ranks()) {
    int64_t bytes = 0;
    for (const auto& [number, layout] : reduced) {
      const std::optional<Position> position = layout->mesh().position_of(rank);
      if (position)
        bytes += num_elements(layout->region(*position)) * layout->dtype().size_bytes() * num_sources[number];
    }
    certificate.reduced_bytes_max = std::max(certificate.reduced_bytes_max, bytes);
  }
  certificate.memory_bytes =
      certificate.reduced_bytes_max + std::max(plan.buckets() * plan.bucket_bytes(), certificate.reducing_bytes_max);
}

}  // namespace

BatchCertificate certificate_of(const BatchPlan& plan) {
  BatchCertificate certificate;
  certificate.items = static_cast<int64_t>(plan.batch().items.size());
  certificate.kinds = static_cast<int64_t>(plan.kinds().size());
  certificate.ranks = static_cast<int64_t>(plan.ranks().size());
  certificate.rounds = plan.num_rounds();
  certificate.bucket_bytes = plan.bucket_bytes();
  certificate.buckets = plan.buckets();
  count_reductions(plan, certificate);
  count_bytes(plan, certificate);
  bound_sent(plan, certificate);
  count_messages(plan, certificate);
  return certificate;
}

std::string BatchCertificate::to_string() const {
  const char* limit = messages_are_exact ? "" : "at most ";
  std::string text = concat(items, items == 1 ? " item of " : " items of ", count_text(kinds, "kind"), " over ",
                            count_text(ranks, "rank"));
  if (reductions > 0) {
    text += concat("\n  reduced before: ", count_text(reductions, "tensor"), "; all ranks receive ",
                   bytes_text(reduction_bytes_sum), "; a rank has at most ", bytes_text(reduced_bytes_max),
                   " of reduced parts, and ", bytes_text(reducing_bytes_max), " of temporaries");
  }
  text +=
      concat("\n  received: ", bytes_text(received_bytes_max), " by the worst rank, ", bytes_text(received_bytes_sum),
             " by all ranks; both are the minimum", reductions == 0 ? "" : " after the reductions");
  text += concat("\n  copied locally: ", bytes_text(kept_bytes_sum), " by all ranks");
  text += concat("\n  sent: ", bytes_text(sent_bytes_max), " by the worst rank; the minimum without forwarding is ",
                 sent_bound_is_exact ? "" : "at least ", bytes_text(sent_bytes_bound));
  text += concat("\n  rounds: ", rounds, "; the minimum for this bucket size is at least ", rounds_bound);
  text += concat("\n  messages: ", limit, messages_sum, " by all ranks, ", limit, messages_max, " to the worst rank");
  const std::string all_buckets = concat(count_text(buckets, "bucket"), " of ", bytes_text(bucket_bytes));
  text += reductions == 0 ? concat("\n  extra memory: ", bytes_text(memory_bytes), " on each rank, ", all_buckets)
                          : concat("\n  extra memory: at most ", bytes_text(memory_bytes),
                                   " on each rank: reduced parts, and temporaries or ", all_buckets);
  return text;
}

std::string BatchCertificate::to_json() const {
  const auto flag = [](bool value) { return value ? "true" : "false"; };
  return concat("{\"items\": ", items, ", \"kinds\": ", kinds, ", \"ranks\": ", ranks,
                ", \"received_bytes_max\": ", received_bytes_max, ", \"received_bytes_sum\": ", received_bytes_sum,
                ", \"kept_bytes_sum\": ", kept_bytes_sum, ", \"sent_bytes_max\": ", sent_bytes_max,
                ", \"sent_bytes_bound\": ", sent_bytes_bound, ", \"sent_bound_is_exact\": ", flag(sent_bound_is_exact),
                ", \"rounds\": ", rounds, ", \"rounds_bound\": ", rounds_bound, ", \"messages_max\": ", messages_max,
                ", \"messages_sum\": ", messages_sum, ", \"messages_are_exact\": ", flag(messages_are_exact),
                ", \"reductions\": ", reductions, ", \"reduction_bytes_sum\": ", reduction_bytes_sum,
                ", \"reduced_bytes_max\": ", reduced_bytes_max, ", \"reducing_bytes_max\": ", reducing_bytes_max,
                ", \"bucket_bytes\": ", bucket_bytes, ", \"buckets\": ", buckets, ", \"memory_bytes\": ", memory_bytes,
                "}");
}

}  // namespace shardwright
