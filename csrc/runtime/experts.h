// Placement of experts on ranks, and routing of tokens to ranks: index arithmetic on the host, without torch.
//
// A *replica* is one expert on one rank. Replicas are numbered by rank, then in the rank's order of experts, so the
// replicas of one rank are consecutive. A *code* selects the replica for one of a token's experts: the replica's number
// plus 1, or 0 for no expert. Codes are sent with the rows, and each receiver uses the codes of its own replicas.
//
// In tables of rows, -1 means no row. The examples below use 4 experts on 3 ranks:
//
//   rank       0         1         2
//   experts    0, 1      2, 3      0, 3
//   replicas   0, 1      2, 3      4, 5
//   codes      1, 2      3, 4      5, 6
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace shardwright {

// The experts on each rank of a group. An expert may be on several ranks. Immutable.
class ExpertPlacement {
 public:
  // experts_of_rank[r]: the experts of rank r of the group, in that rank's order; may be empty. Throws UserError if
  // there is no expert, or if an expert is on no rank, is out of range, or is listed twice for one rank. Memory is
  // linear in the number of listed experts.
  ExpertPlacement(int64_t num_experts, const std::vector<std::vector<int64_t>>& experts_of_rank);

  int64_t num_experts() const { return static_cast<int64_t>(begin_of_expert_.size()) - 1; }
  int num_ranks() const { return static_cast<int>(first_replica_.size()) - 1; }
  int64_t num_replicas() const { return static_cast<int64_t>(rank_of_replica_.size()); }
  // True if some expert is on several ranks.
  bool has_copies() const { return num_replicas() > num_experts(); }
  // The first replica of each rank, then the number of replicas.
  const std::vector<int32_t>& first_replica() const { return first_replica_; }
  // The rank that holds each replica.
  const std::vector<int32_t>& rank_of_replica() const { return rank_of_replica_; }
  // Returns the replicas of an expert in ascending order, which is also the order of their ranks.
  std::span<const int32_t> replicas_of(int64_t expert) const {
    const auto begin = static_cast<size_t>(begin_of_expert_[expert]);
    return {replicas_.data() + begin, static_cast<size_t>(begin_of_expert_[expert + 1]) - begin};
  }
  // Returns a hash of the constructor's arguments, with which ranks compare their placements.
  int64_t hash() const { return hash_; }

 private:
  std::vector<int32_t> first_replica_;    // by rank, then the number of replicas
  std::vector<int32_t> rank_of_replica_;  // by replica
  std::vector<int32_t> begin_of_expert_;  // by expert: the index of its first replica in replicas_; then the size
  std::vector<int32_t> replicas_;         // the replicas of expert 0, of expert 1, ...
  int64_t hash_ = 0;
};

// A view of `per_token` values for each token of a rank: [num_tokens, per_token], row-major. Does not own the data.
template <typename T>
struct PerToken {
  const T* data = nullptr;
  int64_t num_tokens = 0;
  int64_t per_token = 0;  // values per token

  std::span<const T> of(int64_t token) const { return {data + token * per_token, static_cast<size_t>(per_token)}; }
};

// Returns the codes for the expert ids of rank `rank`; the id -1 means no expert. An expert with one replica uses that
// replica. An expert with several replicas uses, in this order of preference, a replica on
//   1. this rank;
//   2. a rank that the token is sent to anyway;
//   3. the rank that holds most of the token's experts that have no code yet. Of several such ranks, one on a node that
//      the token is sent to anyway is preferred (`node_of_rank`; empty if nodes are not known), then the first in
//      cyclic order from `rank` + token on.
// Throws UserError that names rank and token if an id is out of range. For example, token 0:
//
//   rank 0, experts 0, 2, 3   expert 2 is only on rank 1: code 3. Expert 0 is on this rank: code 1. Expert 3 is on rank
//                             1, to which the token is sent for expert 2: code 4. The result is 1, 3, 4.
//   rank 1, expert 0          is on ranks 0 and 2. Rank 2 is first in cyclic order from rank 1 + token 0: code 5.
std::vector<int32_t> choose_replicas(const ExpertPlacement& placement, PerToken<int64_t> expert_ids, int rank,
                                     std::span<const int32_t> node_of_rank);

// Returns the number of codes for each replica; code 0 is not counted.
std::vector<int64_t> count_by_replica(std::span<const int32_t> codes, int64_t num_replicas);

// Limits the number of tokens of each replica to `capacity`, of which the replica has taken[replica] already. Sets
// further codes, in the order of `codes`, to 0 and returns their number. For example, codes 1, 1, 2 with taken 1, 0,
// ... and capacity 2 become 1, 0, 2, and the result is 1.
int64_t drop_beyond_capacity(std::span<int32_t> codes, std::vector<int64_t> taken, int64_t capacity);

// The rows that a rank sends. A row is the data of one token for one receiving rank.
struct RowRoutes {
  std::vector<int64_t> send_rows;    // the token of each row, sorted by receiving rank, then by token
  std::vector<int64_t> row_counts;   // rows for each receiving rank
  std::vector<int64_t> pair_counts;  // codes for replicas of each receiving rank
  int64_t width = 0;                 // columns of rows_of_token
  // [num_tokens, width]: a token's indices into send_rows by ascending rank, then -1
  std::vector<int64_t> rows_of_token;
};

// Returns one row per token and rank, if the token has a code for a replica of the rank. target_of_replica[replica] is
// the rank to send to; -1 means none. For example, two tokens with codes (3, 4) and (1, 3): token 0 is sent to rank 1,
// and token 1 to ranks 0 and 1.
//
//   send_rows       1, 0, 1              row 0 for rank 0, rows 1 and 2 for rank 1
//   row_counts      1, 2, 0
//   pair_counts     1, 3, 0
//   rows_of_token   (1, -1), (0, 2)
RowRoutes route_rows(PerToken<int32_t> codes, std::span<const int32_t> target_of_replica, int num_ranks);

// The copies of received rows that the local experts (experts of this rank) need: one copy for each code of a local
// expert. The copies of one expert are consecutive. A pair is an index into the codes: row * per_token + column.
struct Expansion {
  std::vector<int64_t> pairs;   // by copy: the pair that the copy is for; sorted by expert, then by row
  std::vector<int64_t> copies;  // by pair ([rows, per_token]): the index of its copy in `pairs`, or -1
  std::vector<int64_t> counts;  // by local expert: number of copies
};

// Returns the copies for the replicas first_replica to first_replica + num_local - 1. `codes` has the codes of the
// received rows. The copies for an expert are sorted by origins[row], or by row if `origins` is empty. For example,
// rank 1 has replicas 2 and 3 (codes 3 and 4), and receives rows with codes (3, 4) and (1, 3):
//
//   pairs    0, 3, 1             rows 0 and 1 for replica 2, then row 0 for replica 3
//   copies   (0, 2), (-1, 1)
//   counts   2, 1
Expansion expand_rows(PerToken<int32_t> codes, int64_t first_replica, int64_t num_local,
                      std::span<const int64_t> origins);

}  // namespace shardwright
