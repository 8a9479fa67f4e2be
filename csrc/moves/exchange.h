// Who sends what to whom when the ranks of a group go from one layout to another. The planner counts it, and the
// compiler turns it into instructions.
//
// If several ranks hold the same part (mesh dims replicated in `before`), a receiver reads from the replica with its
// own coordinates on those mesh dims. Alternatively the replicas share the sending: the receivers of a part are lined
// up by position, each with what it needs of the part, and every replica serves a stretch of this line. All stretches
// of a group have the same length, the least with which every line is served; shorter ones would split more messages
// without relieving the worst rank. What a rank already holds stays local. So every element comes from exactly one
// place.
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
#include "moves/known_parts.h"
#include "moves/step.h"

namespace shardwright {

// Returns the position from which `receiver` reads the part of `holder`; both are in one group.
int64_t source_for(const Step& step, int64_t holder, int64_t receiver);

// Returns how many elements `receiver` takes from `source`; 0 if it reads from another replica. Not for steps with
// sharing.
int64_t transfer_elements(const Step& step, int64_t source, int64_t receiver);

// Returns the part of a range that is sent in one of several rounds.
Interval in_round(Interval range, int64_t round, int64_t rounds);

// Larger groups do not share their sending, because that needs a visit to every pair.
constexpr int64_t kMaxSharingGroup = 64;

// Who sends what within the group of one position.
class Transfers {
 public:
  Transfers(const Step& step, int64_t position);

  const std::vector<int64_t>& group() const { return group_; }  // positions, by ascending rank

  // What the `from`-th member sends the `to`-th, as a range of the intersection of what the sender holds and the
  // receiver needs, in packed order.
  Interval range(size_t from, size_t to) const;

 private:
  const Step& step_;
  std::vector<int64_t> group_;
  // For steps with sharing, by member: the part that it holds (the index of the first member that holds it), and its
  // index among the members that hold this part.
  std::vector<size_t> part_;
  std::vector<int64_t> turn_;
  int64_t replicas_ = 1;
  // By part and receiver: the receiver's place in the line, in elements and in receivers; one more entry for the end.
  struct Place {
    int64_t elements = 0;
    int64_t receivers = 0;
  };
  std::vector<std::vector<Place>> line_;
  Place stretch_;
};

// The parts of a tensor dim of n elements that intersect a target: their number, and the elements of the target that
// they cover. Mesh dims in `varying` take every coordinate, others that of `position`.
struct Meeting {
  int64_t elements = 0;
  int64_t parts = 0;
};

Meeting meet(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position, MeshDimSet varying,
             const IntervalList& target);

// Returns the lengths of the parts into which the cuts divide a tensor dim of n elements, and how many parts have each
// length. Empty parts count too. `varying` and `position` as above.
std::map<int64_t, int64_t> part_lengths(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position,
                                        MeshDimSet varying);

// What ranks receive and send in an exchange, computed without visiting the members of their group unless that is
// needed.
class ExchangeTraffic {
 public:
  explicit ExchangeTraffic(const Step& step);
  Traffic at(int64_t position) const;

  // An upper bound for all ranks; nothing if digits do not determine it.
  std::optional<Traffic> at_most() const;

  // Returns whether each source sends the same amount to all its receivers.
  bool has_equal_shares() const { return is_closed_; }

  // How many messages a rank sends in a reduce-scatter: to all others of its group that keep something.
  int64_t messages_to_keepers(int64_t position) const;

  // How many elements a rank holds before the step, and after it.
  int64_t num_held(int64_t position) const { return num_elements(held_, position); }
  int64_t num_needed(int64_t position) const { return num_elements(needed_parts_, position); }

 private:
  // For a rank that keeps `own` elements.
  Traffic closed_form(int64_t own, bool sends) const;
  Traffic walked_at(int64_t position) const;
  Traffic walked_in_rounds(const Coordinates& coordinates) const;
  // For shared sending, which depends on every pair of ranks.
  Traffic pairwise_at(int64_t position) const;
  int64_t num_elements(KnownParts& parts, int64_t position) const;

  // By number of elements, capped at the number of rounds: how many ranks exchange so many with this rank.
  using ByLength = std::map<int64_t, int64_t>;
  // For one tensor dim, over the ranks that differ only in mesh dims of the step that cut `before`: how many of them
  // hold something of what is needed, or need something of what is held, and how much all do together.
  struct Peers {
    int64_t count = 0;
    int64_t elements = 0;
    ByLength by_length;
  };
  // What a tensor dim contributes to a rank's traffic: a factor of each figure.
  struct Factors {
    int64_t own = 1;
    int64_t needed = 1;
    int64_t sent = 1;
    int64_t sources = 1;
    int64_t receivers = 1;
  };
  struct OfDim {
    ByCoordinates<Peers> sources;
    ByCoordinates<Peers> receivers;
    ByCoordinates<Factors> factors;  // with one round
  };
  Factors factors_at(int tensor_dim, const Coordinates& coordinates) const;
  const Peers& sources_at(int tensor_dim, const Coordinates& coordinates, const IntervalList& needed) const;
  const Peers& receivers_at(int tensor_dim, const Coordinates& coordinates, const IntervalList& held) const;
  // Those with parts of a layout that intersect a list, among ranks that differ only in some mesh dims.
  Peers peers_in(const Layout& layout, int tensor_dim, const Coordinates& coordinates, MeshDimSet varying,
                 const IntervalList& list) const;
  // The messages of all rounds to or from ranks that exchange so much in each tensor dim.
  int64_t messages_with(const std::vector<const Peers*>& by_dim) const;

  const Step& step_;
  SharedElements shared_;
  int64_t item_;
  // If parts are equal and digits determine everything: what every rank needs, from how many ranks, and what a rank
  // sends if it sends anything. A rank whose coordinates differ in a tie with replicas sends nothing.
  bool is_closed_ = false;
  int64_t needed_ = 0;
  int64_t sources_ = 1;
  int64_t from_each_ = 1;
  int64_t sent_ = 0;
  std::vector<Matching::Common> ties_with_replicas_;
  // Filled for whole groups, when one of their ranks is requested.
  mutable std::unordered_map<int64_t, Traffic> pairwise_;
  MeshDimSet cutting_;  // the mesh dims of the step that cut `before`
  mutable KnownParts held_;
  mutable KnownParts needed_parts_;
  mutable std::vector<OfDim> dims_;  // by tensor dim
  int64_t idle_receivers_;           // receivers that differ only in mesh dims that cut nothing after the step
};

// Returns whether the backend's own collectives carry out the reduction of a layout over some mesh dims. If not,
// contributions are exchanged and summed here.
bool reduces_natively(const Layout& layout, MeshDimSet mesh_dims, Lowering lowering);
bool reduces_natively(const Step& step, Lowering lowering);

// Returns whether a step can be split into rounds. Local steps cannot, nor can an all-reduce that the backend does in
// place.
bool may_go_in_rounds(const Step& step, Lowering lowering);

// Returns how many collectives a step takes one after the other in each round: two for an all-reduce of more than two
// ranks that is composed here (one reduces chunks, one distributes them), otherwise one.
int64_t collectives_of(StepOp op, int64_t group_size, bool native);

// The traffic of one of k ranks that all hold `held` elements: of one that keeps `kept`, and of the `index`-th by rank.
Traffic reduce_scatter_traffic(int64_t held, int64_t kept, int64_t k, int64_t item_bytes);
Traffic all_reduce_traffic(int64_t held, int64_t k, int64_t index, int64_t item_bytes, bool native);

// Returns the index of a rank among those that differ from it only in these mesh dims, by ascending rank.
int64_t index_in_group(const Mesh& mesh, int64_t position, MeshDimSet mesh_dims);

// Returns one of k chunks of a flat range of n elements: [index * ceil(n / k), ...).
Interval flat_chunk(int64_t n, int64_t k, int64_t index);

}  // namespace shardwright
