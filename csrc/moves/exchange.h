// Who sends what to whom when the ranks of a group go from one layout to another: shared by the planner, which
// counts it, and the compiler, which writes it down.
//
// Where several ranks hold the same part (mesh dims replicated in `before`), a receiver reads from the replica that has
// its own coordinates on those mesh dims. Or they share the sending: receivers stand in line by position, each with
// what it needs of the part, and every replica serves a stretch of the line. All stretches of a group have one length,
// the least that serves every line: shorter ones would split more messages and relieve no rank that matters. Parts held
// at equal coordinates on the cutting dims are the receiver's own and stay local. So every element comes from exactly
// one place.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cost/cost.h"
#include "moves/digits.h"
#include "moves/step.h"

namespace shardwright {

// Position of the rank that `receiver` reads the part of `holder` from, `holder` and `receiver` in one group.
int64_t source_for(const Step& step, int64_t holder, int64_t receiver);

// Elements that `receiver` takes from `source`, 0 where it reads from another replica. Not for steps with sharing.
int64_t transfer_elements(const Step& step, int64_t source, int64_t receiver);

// The part of a range that goes in one of several rounds.
Interval in_round(Interval range, int64_t round, int64_t rounds);

// Larger groups do not share their sending: they are walked pair by pair.
constexpr int64_t kMaxSharingGroup = 64;

// Who sends what within the group of one position.
class Transfers {
 public:
  Transfers(const Step& step, int64_t position);

  const std::vector<int64_t>& group() const { return group_; }  // positions, by ascending rank

  // What the `from`-th of the group sends the `to`-th, as a range of the intersection of what the one holds and the
  // other needs, in packed order.
  Interval range(size_t from, size_t to) const;

 private:
  const Step& step_;
  std::vector<int64_t> group_;
  // Of steps with sharing. By rank of the group: which part it holds, by the first rank that holds it, and its turn
  // among those that do.
  std::vector<size_t> part_;
  std::vector<int64_t> turn_;
  int64_t replicas_ = 1;
  // By part and receiver: where in line the receiver is, in elements and in receivers; one entry more for the end.
  struct Place {
    int64_t elements = 0;
    int64_t receivers = 0;
  };
  std::vector<std::vector<Place>> line_;
  Place stretch_;
};

// The parts into which mesh dims cut a tensor dim of n elements, as far as they meet a target: how many, and what of
// it. Mesh dims in `varying` take every coordinate, others that of `position`.
struct Meeting {
  int64_t elements = 0;
  int64_t parts = 0;
};

Meeting meet(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position, MeshDimSet varying,
             const IntervalList& target);

// What ranks receive and send in an exchange, without a walk over their group unless its pairs matter.
class ExchangeTraffic {
 public:
  explicit ExchangeTraffic(const Step& step);
  Traffic at(int64_t position) const;

  // What no rank has more of; nothing where digits do not say it.
  std::optional<Traffic> at_most() const;

  // Whether each source serves all its receivers alike.
  bool has_equal_shares() const { return is_closed_; }

 private:
  Traffic walked_at(int64_t position) const;
  // Where the sending is shared: what goes between two ranks must be known.
  Traffic pairwise_at(int64_t position) const;
  // Of one tensor dim, over the ranks that differ in `cutting` only: how many of them hold how much of what is needed,
  // by elements up to the number of rounds; and how much of what is held they need together.
  const std::map<int64_t, int64_t>& sources_at(int tensor_dim, int64_t position, MeshDimSet cutting,
                                               const IntervalList& needed) const;
  int64_t sent_at(int tensor_dim, int64_t position, MeshDimSet cutting, const IntervalList& held) const;

  const Step& step_;
  SharedElements shared_;
  int64_t item_;
  // Where parts are equal and digits say it all: what all ranks need, from how many, and what those send that send
  // anything. A rank whose coordinates differ in a tie with replicas sends nothing.
  bool is_closed_ = false;
  int64_t needed_ = 0;
  int64_t sources_ = 1;
  int64_t from_each_ = 1;
  int64_t sent_ = 0;
  std::vector<Matching::Common> ties_with_replicas_;
  // Of whole groups, once a rank of theirs was asked for.
  mutable std::unordered_map<int64_t, Traffic> pairwise_;
  // By tensor dim and the coordinates that matter.
  mutable std::map<std::pair<int, int64_t>, std::map<int64_t, int64_t>> sources_at_;
  mutable std::map<std::pair<int, int64_t>, int64_t> sent_at_;
};

// Whether the backend's own collectives carry out the reduction of a layout over some mesh dims; else it is exchanged
// and summed here.
bool reduces_natively(const Layout& layout, MeshDimSet mesh_dims, Lowering lowering);
bool reduces_natively(const Step& step, Lowering lowering);

// Not what is local, nor an all-reduce that the backend does in place.
bool may_go_in_rounds(const Step& step, Lowering lowering);

// How many collectives a step takes one behind the other, in each round: two where we compose an all-reduce of more
// than two ranks, one to reduce chunks and one to share them.
int64_t collectives_of(StepOp op, int64_t group_size, bool native);

// Of one of k ranks that hold as many elements each and keep `kept`; the `index`-th by rank.
Traffic reduce_scatter_traffic(int64_t held, int64_t kept, int64_t k, int64_t item_bytes);
Traffic all_reduce_traffic(int64_t held, int64_t k, int64_t index, int64_t item_bytes, bool native);

// The turn of a rank among those that differ from it in these mesh dims alone, by ascending rank.
int64_t index_in_group(const Mesh& mesh, int64_t position, MeshDimSet mesh_dims);

// Chunk of a flat range of n elements over k ranks: [index * ceil(n / k), ...).
Interval flat_chunk(int64_t n, int64_t k, int64_t index);

}  // namespace shardwright
