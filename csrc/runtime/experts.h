// Which ranks hold which experts, and where the tokens of a rank go: index arithmetic on the host, without torch.
//
// A *replica* is one expert on one rank. Replicas are numbered by rank, then in the order in which the rank holds them,
// so a rank's own are consecutive. A *code* says which replica serves one of a token's experts: its number plus 1, or 0
// for none. Codes travel with the rows, and every receiver keeps those that are its own.
//
// Tables of rows hold -1 where there is nothing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace shardwright {

class ExpertPlacement {
 public:
  // experts_of_rank[r]: what rank r of the group holds, in its own order; may be empty. Throws UserError where an
  // expert is on no rank, is out of range or is there twice on one rank.
  ExpertPlacement(int64_t num_experts, const std::vector<std::vector<int64_t>>& experts_of_rank);

  int64_t num_experts() const { return static_cast<int64_t>(begin_of_expert_.size()) - 1; }
  int num_ranks() const { return static_cast<int>(first_replica_.size()) - 1; }
  int64_t num_replicas() const { return static_cast<int64_t>(rank_of_replica_.size()); }
  bool has_copies() const { return num_replicas() > num_experts(); }
  // Of ranks, and one more behind the last.
  const std::vector<int32_t>& first_replica() const { return first_replica_; }
  const std::vector<int32_t>& rank_of_replica() const { return rank_of_replica_; }
  // Ascending, and so by rank.
  std::span<const int32_t> replicas_of(int64_t expert) const {
    const auto begin = static_cast<size_t>(begin_of_expert_[expert]);
    return {replicas_.data() + begin, static_cast<size_t>(begin_of_expert_[expert + 1]) - begin};
  }
  // Equal for equal placements, on every rank.
  int64_t hash() const { return hash_; }

 private:
  std::vector<int32_t> first_replica_;
  std::vector<int32_t> rank_of_replica_;
  std::vector<int32_t> begin_of_expert_;  // in replicas_
  std::vector<int32_t> replicas_;
  int64_t hash_ = 0;
};

// What a rank was told about its tokens: [num_tokens, per_token], row-major.
template <typename T>
struct PerToken {
  const T* data = nullptr;
  int64_t num_tokens = 0;
  int64_t per_token = 0;

  std::span<const T> of(int64_t token) const { return {data + token * per_token, static_cast<size_t>(per_token)}; }
};

// Codes for the expert ids of rank `rank`; -1 is no expert. An expert with one replica is served by it. One with
// several is served by this rank, else by a rank that the token goes to anyway, else by the rank that holds most of
// what the token still lacks; of several such ranks by one on a node that the token goes to anyway (`node_of_rank`;
// empty where nodes are not known), then by the next one in cyclic order from `rank` + token on. Throws UserError,
// naming rank and token, for an id that is out of range.
std::vector<int32_t> choose_replicas(const ExpertPlacement& placement, PerToken<int64_t> expert_ids, int rank,
                                     std::span<const int32_t> node_of_rank);

// How often each replica is asked for.
std::vector<int64_t> count_by_replica(std::span<const int32_t> codes, int64_t num_replicas);

// Sets to 0 the codes beyond what a replica takes, in token order: it has taken[replica] already, and takes `capacity`
// in all. Returns how many.
int64_t drop_beyond(std::span<int32_t> codes, std::vector<int64_t> taken, int64_t capacity);

// The rows that a rank sends, each to one rank.
struct RowRoutes {
  std::vector<int64_t> send_rows;    // which token, by receiving rank, then by token
  std::vector<int64_t> row_counts;   // per receiving rank
  std::vector<int64_t> pair_counts;  // codes that are its own, per receiving rank
  int64_t width = 0;
  std::vector<int64_t> returns;  // [num_tokens, width]: places in send_rows by ascending rank, then -1
};

// A token goes once to each rank that `target_of_replica` names for one of its codes; -1 is no rank.
RowRoutes route_rows(PerToken<int32_t> codes, std::span<const int32_t> target_of_replica, int num_ranks);

// Rows that arrived, copied once for each expert of this rank that they are for.
struct Expansion {
  std::vector<int64_t> pairs;   // row * per_token + which of its codes, by expert, then in the order of rows
  std::vector<int64_t> places;  // [rows, per_token]: where in `pairs`, or -1
  std::vector<int64_t> counts;  // per expert of this rank
};

// `origins`: an order of the rows; empty where they lie in order.
Expansion expand_rows(PerToken<int32_t> codes, int64_t first_replica, int64_t num_local,
                      std::span<const int64_t> origins);

}  // namespace shardwright
