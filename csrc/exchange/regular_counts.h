// Counts of an exchange on one mesh in closed form, from digits (digits.h). Their cost does not depend on the number of
// ranks.
//
// If digits describe both layouts, the exchange is *regular*: all messages are equal except for peers and offsets. A
// *tie* is a digit that both layouts fix, by different coordinates: two ranks can exchange data only if they agree on
// its value.
//
// Example: 8 x 8 elements move from S(0) to S(1) over a=4. There are no ties. A rank needs 4 elements from each of the
// 4 ranks. It has 4 of its 16 elements, so it receives 12 in 3 messages.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cost/cost.h"
#include "exchange/digits.h"

namespace shardwright {

class RegularCounts {
 public:
  // Returns nullopt if the exchange is not regular or the tensor has no dims. The layouts must be on one mesh and
  // outlive the object. Of several replicas of a part, a rank receives from the replica with the rank's own coordinates
  // (ReplicaPolicy::kAligned), in `rounds` rounds.
  static std::optional<RegularCounts> of(const Layout& before, const Layout& after, int64_t rounds);

  // Returns the traffic of a rank in all rounds.
  Traffic traffic(int64_t position) const;
  // Returns an upper bound on the traffic of every rank.
  Traffic upper_bound() const;

  bool has_ties() const { return !ties_.empty(); }
  // Return the value of each tie in a rank's part before the move, and in its part after the move.
  std::vector<int64_t> tie_values_before(int64_t position) const;
  std::vector<int64_t> tie_values_after(int64_t position) const;
  // Returns true if tie_values_before(from) equals tie_values_after(to). Exactly then the part that `from` holds has
  // elements that `to` needs.
  bool ties_agree(int64_t from, int64_t to) const;

 private:
  RegularCounts(const Layout& before, const Layout& after, int64_t rounds);

  // Returns the traffic of a rank that keeps `own` elements. `sends`: false if other replicas send its part.
  Traffic traffic_with(int64_t own, bool sends) const;

  const Mesh& mesh_;
  int64_t item_bytes_;
  int64_t rounds_;
  SharedElements kept_;                 // elements that a rank holds before and needs after
  std::vector<Matching::Common> ties_;  // digits that both layouts fix, by different coordinates
  // Ties in which the mesh dim of the layout after replicates the layout before. A rank that disagrees in one of them
  // sends nothing, because receivers read from other replicas.
  std::vector<Matching::Common> replica_ties_;
  // The following counts include what a rank keeps.
  int64_t needed_elements_;       // elements that every rank needs
  int64_t sources_ = 1;           // ranks that a rank receives from
  int64_t message_elements_ = 1;  // elements of each message
  int64_t sent_elements_;         // elements that a sender sends
};

}  // namespace shardwright
