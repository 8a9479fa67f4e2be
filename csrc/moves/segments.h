// Plans whose tensor is moved in segments: while one segment takes a step, the next one takes the step before it. So a
// rank passes on what it has while more arrives, and links within nodes and between them are in use at the same time.
//
// A segment has some indices of one tensor dim, and every rank has in it those elements of its part. The *borders* of
// the tensor dim are where some part of some layout of the plan begins or ends. Between two borders, each segment has
// one stretch. 16 rows that are S(0) over 4 ranks before and over 2 after have borders at 0, 4, 8, 12 and 16. In two
// segments, the first has rows 0, 1, 4, 5, 8, 9, 12 and 13.
//
// Segments are *alike* where mesh dims cut the tensor dim at multiples of a cell, the same on both meshes and in every
// step, and their number divides the cell: 4 rows in the example. Then a segment is a tensor of its own with placements
// that cut alike, but with a tensor dim that is `count` times shorter, and what is known of one holds for all.
// Otherwise segment i has as many of any run of indices as are i modulo `count`, so of each part of each layout an
// equal share but for one index for each of its runs. 7 rows that are S(0) over 2 ranks before and over 3 after have
// parts of 4 and 3, and of 3, 3 and 1:
//
//   borders             0 . . 3 4 . 6 7
//   segment 0 of 2      0 1     4   6           2 + 2, and 2, 1 and 1
//   segment 1 of 2          2 3   5             2 + 1, and 1, 2 and 0
//
//   slot              0          1          2
//   crosses           segment 0  segment 1
//   is gathered                  segment 0  segment 1
#pragma once

#include <cstdint>

#include "moves/plan.h"

namespace shardwright {

constexpr int64_t kMaxSegments = 256;

// Segments that are not alike have programs of their own, so there are fewer, of tensor dims with no more borders, and
// on no more ranks.
constexpr int64_t kMaxUnlikeSegments = 32;
constexpr int64_t kMaxBorders = 4096;
constexpr int64_t kMaxRanksInUnlikeSegments = 512;

// Returns the length of the cells of a tensor dim; 0 if the parts of some layout of the plan are not made of cells, or
// if some layout flattens dims. Parts of unequal lengths have cells where only the last cut makes them so, each one run
// of its list.
int64_t cell_length(const Plan& plan, int tensor_dim);

// Returns whether a plan between two meshes can be carried out in these segments: they must be alike or within the
// limits above, and every step must communicate once at most.
bool may_go_in(const Plan& plan, const Segments& segments);

// Returns whether all segments of a plan are alike.
bool are_alike(const Plan& plan);

// Returns what becomes of each segment, as plans with one segment: one plan for all if they are alike.
std::vector<Plan> plans_of_segments(const Plan& plan);

// The parts of one tensor dim that the ranks of a layout have, in segments that are not alike. The layout must be
// within the limits above.
class PartsInSegments {
 public:
  PartsInSegments(const Layout& layout, int tensor_dim);
  int64_t longest() const { return longest_; }
  // Returns how many indices of some part some segment has at most.
  int64_t most_in_one(int64_t count) const;

 private:
  std::vector<IntervalList> parts_;
  int64_t longest_ = 0;
};

}  // namespace shardwright
