#include "runtime/experts.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "support/error.h"

namespace shardwright {
namespace {

// FNV-1a over 64-bit words.
class Hash {
 public:
  void add(uint64_t word) {
    for (int byte = 0; byte < 8; ++byte) value_ = (value_ ^ ((word >> (8 * byte)) & 0xff)) * 0x100000001b3ULL;
  }
  int64_t value() const { return static_cast<int64_t>(value_); }

 private:
  uint64_t value_ = 0xcbf29ce484222325ULL;
};

// Chooses the replicas of one token after another, in the order of preference of choose_replicas. A *visited* rank is a
// rank to which the current token is sent; this rank is always visited. A *pending* expert has no code yet.
class ReplicaChoice {
 public:
  ReplicaChoice(const ExpertPlacement& placement, int rank, std::span<const int32_t> node_of_rank)
      : placement_(placement),
        rank_(rank),
        num_ranks_(placement.num_ranks()),
        node_of_rank_(node_of_rank),
        rank_stamp_(num_ranks_, -1),
        node_stamp_(node_of_rank.empty() ? 0 : *std::max_element(node_of_rank.begin(), node_of_rank.end()) + 1, -1),
        num_pending_(num_ranks_, 0) {}

  // Writes a code for each expert id of a token: first for experts on one rank only, then for experts on a visited
  // rank. Then it visits further ranks, each time the rank with most pending experts, until no expert is pending.
  void choose(int64_t token, std::span<const int64_t> expert_ids, std::span<int32_t> codes) {
    token_ = token;
    visit(rank_);
    pending_.clear();
    for (size_t j = 0; j < expert_ids.size(); ++j) {
      codes[j] = 0;
      if (expert_ids[j] < 0) continue;
      const auto replicas = placement_.replicas_of(expert_ids[j]);
      if (replicas.size() > 1) {
        pending_.push_back(j);
      } else {
        codes[j] = replicas.front() + 1;
        visit(placement_.rank_of_replica()[replicas.front()]);
      }
    }
    std::erase_if(pending_, [&](size_t j) { return (codes[j] = code_on_visited(expert_ids[j])) != 0; });
    while (!pending_.empty()) {
      const int next = rank_with_most_pending(expert_ids);
      visit(next);
      std::erase_if(pending_, [&](size_t j) { return (codes[j] = code_on(next, expert_ids[j])) != 0; });
    }
  }

 private:
  // Marks a rank and its node as visited.
  void visit(int rank) {
    rank_stamp_[rank] = token_;
    if (!node_of_rank_.empty()) node_stamp_[node_of_rank_[rank]] = token_;
  }

  // Returns the number of steps from one rank to another in cyclic order.
  int distance(int64_t from, int rank) const {
    return static_cast<int>((rank - from % num_ranks_ + num_ranks_) % num_ranks_);
  }

  // Returns the code of an expert's replica on a visited rank, or 0 if there is none. Of several such ranks it takes
  // the first in cyclic order from this rank on.
  int32_t code_on_visited(int64_t expert) const {
    int32_t code = 0;
    int least = std::numeric_limits<int>::max();
    for (const int32_t replica : placement_.replicas_of(expert)) {
      const int rank = placement_.rank_of_replica()[replica];
      if (rank_stamp_[rank] != token_ || distance(rank_, rank) >= least) continue;
      least = distance(rank_, rank);
      code = replica + 1;
    }
    return code;
  }

  // Returns the code of an expert's replica on a rank, or 0 if the expert is not on the rank.
  int32_t code_on(int rank, int64_t expert) const {
    for (const int32_t replica : placement_.replicas_of(expert)) {
      if (placement_.rank_of_replica()[replica] == rank) return replica + 1;
    }
    return 0;
  }

  // Returns the rank with most pending experts. Of several such ranks it prefers one on a visited node, then the first
  // in cyclic order from this rank + token on. The score orders ranks by these three criteria.
  int rank_with_most_pending(std::span<const int64_t> expert_ids) {
    const auto for_each_pending_replica = [&](const auto& use) {
      for (const size_t j : pending_) {
        for (const int32_t replica : placement_.replicas_of(expert_ids[j])) use(placement_.rank_of_replica()[replica]);
      }
    };
    for_each_pending_replica([&](int rank) { ++num_pending_[rank]; });
    int best = -1;
    int64_t best_score = -1;
    for_each_pending_replica([&](int rank) {
      const bool is_on_visited_node = !node_of_rank_.empty() && node_stamp_[node_of_rank_[rank]] == token_;
      const int64_t score = (2 * num_pending_[rank] + (is_on_visited_node ? 1 : 0)) * num_ranks_ + num_ranks_ - 1 -
                            distance(rank_ + token_, rank);
      if (score <= best_score) return;
      best_score = score;
      best = rank;
    });
    for_each_pending_replica([&](int rank) { num_pending_[rank] = 0; });
    return best;
  }

  const ExpertPlacement& placement_;
  int rank_;
  int num_ranks_;
  std::span<const int32_t> node_of_rank_;
  int64_t token_ = -1;
  std::vector<int64_t> rank_stamp_;  // by rank: the last token for which the rank was visited; -1: none
  std::vector<int64_t> node_stamp_;  // by node: the last token for which the node was visited; -1: none
  // By rank: the number of pending experts on it. All are 0 except in rank_with_most_pending.
  std::vector<int64_t> num_pending_;
  std::vector<size_t> pending_;  // indices of the token's pending experts
};

// Throws UserError if an expert id is neither -1 nor an expert of the placement.
void check_ids(const ExpertPlacement& placement, PerToken<int64_t> ids, int rank) {
  for (int64_t i = 0; i < ids.num_tokens * ids.per_token; ++i) {
    check_user(ids.data[i] >= -1 && ids.data[i] < placement.num_experts(), "expert_ids must be in [-1, ",
               placement.num_experts() - 1, "] (-1 for no expert), got ", ids.data[i], " for token ", i / ids.per_token,
               " on rank ", rank, " of the group");
  }
}

// Inserts a rank into the ascending list `ranks` if it is missing.
void insert(std::vector<int32_t>& ranks, int32_t rank) {
  const auto at = std::lower_bound(ranks.begin(), ranks.end(), rank);
  if (at == ranks.end() || *at != rank) ranks.insert(at, rank);
}

// Throws UserError unless every expert is listed and all listed experts are in range. Allocates no memory for
// `num_experts`, which a mistyped id can make very large.
void check_all_are_listed(int64_t num_experts, const std::vector<std::vector<int64_t>>& experts_of_rank) {
  std::vector<int64_t> listed;
  for (size_t rank = 0; rank < experts_of_rank.size(); ++rank) {
    for (const int64_t expert : experts_of_rank[rank]) {
      check_user(expert >= 0 && expert < num_experts, "placement: experts must be in [0, ", num_experts - 1, "], got ",
                 expert, " on rank ", rank, " of the group");
      listed.push_back(expert);
    }
  }
  std::sort(listed.begin(), listed.end());
  listed.erase(std::unique(listed.begin(), listed.end()), listed.end());
  int64_t missing = 0;
  while (missing < static_cast<int64_t>(listed.size()) && listed[missing] == missing) ++missing;
  check_user(missing == num_experts, "placement: each of ", num_experts,
             " experts must be on at least one rank, got none for expert ", missing);
}

// Returns, for each entry, the sum of the counts before it.
std::vector<int64_t> starts_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> starts(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), starts.begin(), int64_t{0});
  return starts;
}

}  // namespace

ExpertPlacement::ExpertPlacement(int64_t num_experts, const std::vector<std::vector<int64_t>>& experts_of_rank) {
  check_user(num_experts > 0, "placement: the number of experts must be at least 1, got ", num_experts);
  check_all_are_listed(num_experts, experts_of_rank);
  Hash hash;
  hash.add(static_cast<uint64_t>(num_experts));
  first_replica_.push_back(0);
  std::vector<std::vector<int32_t>> replicas(num_experts);
  for (size_t rank = 0; rank < experts_of_rank.size(); ++rank) {
    hash.add(experts_of_rank[rank].size());
    for (const int64_t expert : experts_of_rank[rank]) {
      std::vector<int32_t>& replicas_of_expert = replicas[expert];
      const bool is_duplicate = !replicas_of_expert.empty() && replicas_of_expert.back() >= first_replica_.back();
      check_user(!is_duplicate, "placement: an expert must be listed at most once per rank, got expert ", expert,
                 " twice on rank ", rank, " of the group");
      replicas_of_expert.push_back(static_cast<int32_t>(rank_of_replica_.size()));
      rank_of_replica_.push_back(static_cast<int32_t>(rank));
      hash.add(static_cast<uint64_t>(expert));
    }
    first_replica_.push_back(static_cast<int32_t>(rank_of_replica_.size()));
  }
  begin_of_expert_.push_back(0);
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    replicas_.insert(replicas_.end(), replicas[expert].begin(), replicas[expert].end());
    begin_of_expert_.push_back(static_cast<int32_t>(replicas_.size()));
  }
  hash_ = hash.value();
}

std::vector<int32_t> choose_replicas(const ExpertPlacement& placement, PerToken<int64_t> expert_ids, int rank,
                                     std::span<const int32_t> node_of_rank) {
  check_ids(placement, expert_ids, rank);
  const size_t per_token = static_cast<size_t>(expert_ids.per_token);
  std::vector<int32_t> codes(static_cast<size_t>(expert_ids.num_tokens) * per_token);
  if (!placement.has_copies()) {
    for (size_t i = 0; i < codes.size(); ++i) {
      codes[i] = expert_ids.data[i] < 0 ? 0 : placement.replicas_of(expert_ids.data[i]).front() + 1;
    }
    return codes;
  }
  ReplicaChoice choice(placement, rank, node_of_rank);
  for (int64_t token = 0; token < expert_ids.num_tokens; ++token) {
    choice.choose(token, expert_ids.of(token), std::span(codes).subspan(token * per_token, per_token));
  }
  return codes;
}

std::vector<int64_t> count_by_replica(std::span<const int32_t> codes, int64_t num_replicas) {
  std::vector<int64_t> counts(num_replicas, 0);
  for (const int32_t code : codes) {
    if (code != 0) ++counts[code - 1];
  }
  return counts;
}

int64_t drop_beyond_capacity(std::span<int32_t> codes, std::vector<int64_t> taken, int64_t capacity) {
  int64_t dropped = 0;
  for (int32_t& code : codes) {
    if (code == 0 || taken[code - 1]++ < capacity) continue;
    code = 0;
    ++dropped;
  }
  return dropped;
}

// The first pass over the tokens counts the rows of each rank, the second one assigns rows to tokens.
RowRoutes route_rows(PerToken<int32_t> codes, std::span<const int32_t> target_of_replica, int num_ranks) {
  RowRoutes routes;
  routes.row_counts.assign(num_ranks, 0);
  routes.pair_counts.assign(num_ranks, 0);
  routes.width = std::min<int64_t>(codes.per_token, num_ranks);
  std::vector<int32_t> targets;
  const auto find_targets = [&](int64_t token) {
    targets.clear();
    for (const int32_t code : codes.of(token)) {
      if (code != 0 && target_of_replica[code - 1] >= 0) insert(targets, target_of_replica[code - 1]);
    }
  };
  for (int64_t token = 0; token < codes.num_tokens; ++token) {
    find_targets(token);
    for (const int32_t target : targets) ++routes.row_counts[target];
    for (const int32_t code : codes.of(token)) {
      if (code != 0 && target_of_replica[code - 1] >= 0) ++routes.pair_counts[target_of_replica[code - 1]];
    }
  }
  std::vector<int64_t> next = starts_of(routes.row_counts);
  routes.send_rows.resize(std::reduce(routes.row_counts.begin(), routes.row_counts.end()));
  routes.rows_of_token.assign(codes.num_tokens * routes.width, -1);
  for (int64_t token = 0; token < codes.num_tokens; ++token) {
    find_targets(token);
    for (size_t i = 0; i < targets.size(); ++i) {
      const int64_t row = next[targets[i]]++;
      routes.send_rows[row] = token;
      routes.rows_of_token[token * routes.width + static_cast<int64_t>(i)] = row;
    }
  }
  return routes;
}

// A counting sort of the codes by local expert, with rows in the order of their origins.
Expansion expand_rows(PerToken<int32_t> codes, int64_t first_replica, int64_t num_local,
                      std::span<const int64_t> origins) {
  std::vector<int64_t> order(codes.num_tokens);
  std::iota(order.begin(), order.end(), int64_t{0});
  if (!std::is_sorted(origins.begin(), origins.end())) {
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return origins[a] < origins[b]; });
  }
  const auto local_of = [&](int32_t code) {
    const int64_t local = code - 1 - first_replica;
    return code != 0 && local >= 0 && local < num_local ? local : -1;
  };
  Expansion expansion;
  expansion.counts.assign(num_local, 0);
  const int64_t num_codes = codes.num_tokens * codes.per_token;
  for (int64_t i = 0; i < num_codes; ++i) {
    if (const int64_t local = local_of(codes.data[i]); local >= 0) ++expansion.counts[local];
  }
  std::vector<int64_t> next = starts_of(expansion.counts);
  expansion.pairs.resize(std::reduce(expansion.counts.begin(), expansion.counts.end()));
  expansion.copies.assign(num_codes, -1);
  for (const int64_t row : order) {
    for (int64_t j = 0; j < codes.per_token; ++j) {
      const int64_t pair = row * codes.per_token + j;
      const int64_t local = local_of(codes.data[pair]);
      if (local < 0) continue;
      expansion.copies[pair] = next[local]++;
      expansion.pairs[expansion.copies[pair]] = pair;
    }
  }
  return expansion;
}

}  // namespace shardwright
