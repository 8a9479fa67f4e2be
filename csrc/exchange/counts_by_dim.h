// Counts of an exchange on one mesh without digits: products of the counts of each tensor dim.
//
// Each combination of coordinates on the mesh dims that cut the layout before is one rank that may hold some of the
// needed elements. Tensor dims are cut by different mesh dims, so their counts multiply. Sent elements are counted in
// the same way, over the receivers with the rank's coordinates on the replica dims (group_move.h).
//
// Example: 9 x 4 elements on (a=2, b=2) move from [S(0), S(1)] to [R, S(0)]. Rank (0, 0) has rows 0 to 4 of columns 0
// and 1, and needs rows 0 to 4 of all columns.
//
//   sources     1 coordinate of a has its rows, 2 coordinates of b have its columns: 1 * 2 ranks, itself included
//   receivers   1 coordinate of b needs its rows, on both coordinates of a: 1 * 2 ranks, itself included
//   traffic     it receives 5 * 4 - 5 * 2 = 10 elements in 1 message, and sends 5 * 2 * 2 - 5 * 2 = 10 in 1 message
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "cost/cost.h"
#include "exchange/group_move.h"

namespace shardwright {

// Caches results. The move must outlive the object.
class CountsByDim {
 public:
  explicit CountsByDim(GroupMove& move);

  // Returns the traffic of a rank in all rounds.
  Traffic traffic(int64_t position);
  // Returns the number of messages that a rank sends in a reduce-scatter by messages: one to each other member of its
  // group that needs some of its elements, in each round, but at most one per element.
  int64_t reduce_scatter_messages(int64_t position);

 private:
  // Counts of the ranks, among ranks that differ only in some mesh dims, whose parts of one tensor dim overlap a list.
  struct Peers {
    int64_t count = 0;     // number of these ranks
    int64_t elements = 0;  // number of common indices, summed over these ranks
    // Number of these ranks by the number of common indices. A larger number of indices than of rounds counts as the
    // number of rounds. Only with several rounds.
    std::map<int64_t, int64_t> by_length;
  };
  // The contribution of a tensor dim to a rank's traffic. Peers include the rank itself.
  struct Factors {
    int64_t own;             // indices that the rank both holds and needs
    int64_t needed;          // indices that the rank needs
    const Peers* sources;    // ranks that hold indices that this rank needs
    const Peers* receivers;  // ranks that need indices that this rank holds
  };
  struct Dim {  // caches of one tensor dim, for all ranks
    ByCoordinates<Peers> sources;
    ByCoordinates<Peers> receivers;
    ByCoordinates<Factors> factors;
  };

  // Returns the factors of a tensor dim for the rank at a position.
  Factors factors_at(int tensor_dim, int64_t position);
  // Counts the ranks whose parts of a layout overlap a list, among ranks that differ from `position` only in `varying`.
  Peers count_peers(const Layout& layout, int tensor_dim, int64_t position, MeshDimSet varying,
                    const IntervalList& list) const;
  // Returns the number of messages to (or from) all peers in all rounds together.
  int64_t num_messages(const std::vector<const Peers*>& by_dim) const;

  GroupMove& move_;
  std::vector<Dim> dims_;                // by tensor dim
  std::vector<const Peers*> sources_;    // scratch of traffic(), by tensor dim
  std::vector<const Peers*> receivers_;  // scratch of traffic(), by tensor dim
};

}  // namespace shardwright
