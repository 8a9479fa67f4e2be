// Intersections of the parts of one tensor dim with a list of its indices (the *target*), without visiting ranks one
// by one.
//
// Example: 12 indices cut by a=2, then b=2, into [0, 3) [3, 6) [6, 9) [9, 12). The target is [2, 10).
//
//   varying = {a, b}                        for_each_overlap() visits (1, 1) (3, 1) (3, 1) (1, 1); overlap() is {8, 4}
//   varying = {b}, position at a=1, b=0     for_each_overlap() visits (3, 1) (1, 1); overlap() is {4, 2}
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>

#include "layout/layout.h"

namespace shardwright {

// Counts of the parts that intersect a target.
struct AxisOverlap {
  int64_t elements = 0;  // sum over these parts: number of indices of the part that are in the target
  int64_t parts = 0;     // number of these parts
};

// Counts the parts that intersect the target, out of the parts into which `cuts` divide a tensor dim of n elements.
// Mesh dims in `varying` take every coordinate; the other mesh dims have the coordinates of `position`. The target must
// ascend.
AxisOverlap overlap(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position, MeshDimSet varying,
                    const IntervalList& target);

// Calls visit(elements, times) for the parts that overlap() counts. Parts that have equally many elements in common
// with the target may be counted together.
void for_each_overlap(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position, MeshDimSet varying,
                      const IntervalList& target, const std::function<void(int64_t elements, int64_t times)>& visit);

// Returns the number of parts by length, out of the parts into which the cuts divide a tensor dim of n elements. Empty
// parts count too. `varying` and `position` have the meaning that they have in overlap().
std::map<int64_t, int64_t> part_lengths(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position,
                                        MeshDimSet varying);

}  // namespace shardwright
