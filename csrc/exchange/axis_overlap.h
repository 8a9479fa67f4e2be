// Intersections of the parts of one tensor dim with a list of its indices (the *target*), without visiting ranks one
// by one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>

#include "layout/layout.h"

namespace shardwright {

// The parts of a tensor dim that intersect a target.
struct AxisOverlap {
  int64_t elements = 0;  // number of their indices in the target, summed over these parts
  int64_t parts = 0;     // number of these parts
};

// Counts the parts that intersect the target, out of the parts into which `cuts` divide a tensor dim of n elements.
// Mesh dims in `varying` take every coordinate; the other mesh dims have the coordinates of `position`.
AxisOverlap overlap(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position, MeshDimSet varying,
                    const IntervalList& target);

// Calls visit(elements, times) for the parts that overlap() counts. Parts that have equally many elements in common
// with the target may be counted together.
void for_each_overlap(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position, MeshDimSet varying,
                      const IntervalList& target, const std::function<void(int64_t elements, int64_t times)>& visit);

// Returns the number of parts of each length into which the cuts divide a tensor dim of n elements. Empty parts count
// too. `varying` and `position` have the meaning that they have in overlap().
std::map<int64_t, int64_t> part_lengths(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position,
                                        MeshDimSet varying);

}  // namespace shardwright
