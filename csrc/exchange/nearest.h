// Finds the cut of a tensor on other ranks that moves the fewest elements, for example after some ranks left.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/layout.h"
#include "layout/rank.h"

namespace shardwright {

// A cut of one tensor dim by rows. A row is one index of the dim, with all indices of the other dims.
struct NearestCut {
  int dim = 0;                               // the tensor dim that is cut
  std::vector<std::vector<Interval>> lists;  // by index of the rank in `ranks`: its rows of the dim, ascending
};

// Returns a cut of one dim that leaves the most elements on their rank. Each of the dim's n rows is on one rank, and no
// rank has more than ceil(n / ranks) rows. Of equally good dims, the first is cut. Ranks outside the layout's mesh hold
// nothing. There must be a rank, and the layout must have a dim and no pending reductions.
//
// Example: 6 rows on ranks 0, 1 and 2, so at most 2 on each. Rank 0 holds rows 0 to 3, and rank 1 rows 0 and 1.
//
//   rank 0 keeps 2 of its rows               rank 0: rows 0 and 1
//   rank 1 holds only rows 0 and 1, so       rank 1: rows 0 and 1
//     rank 0 keeps 2 of its other rows       rank 0: rows 2 and 3
//   rank 2 gets the rows that nobody keeps   rank 2: rows 4 and 5
NearestCut nearest_cut(const Layout& src, const std::vector<Rank>& ranks);

}  // namespace shardwright
