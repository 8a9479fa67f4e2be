// The traffic of single ranks in moves between numbered lists of cuts (moves/cut_lists.h). The ranks are at corners
// (moves/rank_classes.h), and are examined if some pair of lists has no closed form (moves/list_pairs.h).
//
// Every mesh dim cuts at most one tensor dim, so counts are products over tensor dims. The factors are cached.
#pragma once

#include <array>
#include <cstdint>
#include <memory_resource>
#include <unordered_map>
#include <vector>

#include "cost/cost.h"
#include "moves/cut_lists.h"

namespace shardwright {

class CornerTraffic {
 public:
  // The layout, which has the shape and the mesh, and the lists must outlive the object.
  CornerTraffic(const Layout& layout, const CutLists& lists) : layout_(layout), lists_(lists) {}

  // The factors of one tensor dim in the traffic of one rank. The products over tensor dims are the counts in elements
  // and ranks; see exchange(). The peers are the ranks whose coordinates differ only on the mesh dims `varying`.
  struct Factors {
    int64_t kept = 0;       // indices that the rank holds before and needs after
    int64_t sources = 0;    // parts before the move, of the rank and its peers, with indices that the rank needs
    int64_t sent = 0;       // indices that the rank holds, summed over the parts after the move that need them
    int64_t receivers = 0;  // parts after the move, of the rank and its peers, with indices that the rank holds
  };
  // Returns the factors of one tensor dim. `before` and `after` are the numbers of its lists. The reference stays valid
  // as long as the object.
  const Factors& factors(int tensor_dim, int before, int after, MeshDimSet varying, Corner corner);

  // Returns the number of elements of the tensor that the rank at a corner holds. `lists` has the number of one list
  // for each tensor dim.
  int64_t elements(const std::vector<int>& lists, Corner corner);
  // Returns the traffic of the rank at a corner in an exchange with the peers along `varying`. `before` and `after`
  // have the number of one list for each tensor dim, and `replicas_after` is the number of peers, the rank included,
  // with equal parts after the move.
  //
  // Example: 8 rows on a=2, b=4 from [S(0), R] to [R, S(0)] over `varying` = {a}. Rank (0, 0) has rows 0 to 3 and needs
  // rows 0 and 1. Its peer (1, 0) has rows 4 to 7 and needs rows 0 and 1, so replicas_after is 2.
  //   rank (0, 0)   kept 2, sources 1, sent 2, receivers 1; it sends 2 * 2 - 2 = 2 rows in 1 message
  //   rank (1, 0)   kept 0, sources 1, sent 0, receivers 0; it receives 2 - 0 = 2 rows in 1 message
  Traffic exchange(const std::vector<int>& before, const std::vector<int>& after, MeshDimSet varying,
                   int64_t replicas_after, Corner corner);

 private:
  // Tensor dim, list before, list after, bits of the varying mesh dims, `last` and `base` of the corner.
  using Key = std::array<uint32_t, 6>;
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };
  static Key key(int tensor_dim, int before, int after, uint32_t varying, Corner corner);

  // Return the factors for the rank at `position`. factors_by_digits() needs digits of both lists that match;
  // factors_by_parts() compares the parts of any two lists.
  Factors factors_by_digits(const Matching& matching, MeshDimSet varying, int64_t position) const;
  Factors factors_by_parts(int64_t n, const std::vector<Cut>& before, const std::vector<Cut>& after, MeshDimSet varying,
                           int64_t position) const;
  // Returns the number of indices of a tensor dim that the rank at a corner holds. `list` is the number of a list.
  int64_t length(int tensor_dim, int list, Corner corner);

  const Layout& layout_;
  const CutLists& lists_;
  std::pmr::monotonic_buffer_resource memory_;  // memory of factors_ and lengths_, which only grow
  std::pmr::unordered_map<Key, Factors, KeyHash> factors_{&memory_};
  std::pmr::unordered_map<Key, int64_t, KeyHash> lengths_{&memory_};
};

}  // namespace shardwright
