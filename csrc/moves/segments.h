// Plans whose tensor is moved in segments: while one segment takes a step, the next one takes the step before it. So a
// rank passes on what it has while more arrives, and links within nodes and between them are in use at the same time.
//
// A segment is a tensor of its own with placements that cut alike, but with a tensor dim that is `count` times shorter.
// Where mesh dims cut this tensor dim, they do so at multiples of a *cell*, the same on both meshes and in every step.
// Parts may be unequal as long as they consist of cells. A segment has an equal share of each cell. 16 rows that are
// S(0) over 4 ranks before and over 2 after have cells of 4 rows. In two segments, the first has rows 0, 1, 4, 5, 8, 9,
// 12 and 13, which are S(0) over 4 ranks before and over 2 after too.
//
//   slot              0          1          2
//   crosses           segment 0  segment 1
//   is gathered                  segment 0  segment 1
#pragma once

#include <cstdint>

#include "moves/plan.h"

namespace shardwright {

constexpr int64_t kMaxSegments = 256;

// Returns the length of the cells of a tensor dim; 0 if the parts of some layout of the plan are not made of cells, or
// if some layout flattens dims. Parts of unequal lengths have cells where only the last cut makes them so, each one run
// of its list.
int64_t cell_length(const Plan& plan, int tensor_dim);

// Returns whether a plan between two meshes can be carried out in these segments: they must divide the cells, and every
// step must communicate once at most.
bool may_go_in(const Plan& plan, const Segments& segments);

// Return what becomes of one segment: a plan with one segment, and its layouts.
Plan plan_of_segment(const Plan& plan);
Layout layout_of_segment(const Layout& layout, const Segments& segments);

}  // namespace shardwright
