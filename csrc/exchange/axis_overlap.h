// The overlap of the parts of one tensor dim with some indices of it, without examining ranks one by one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>

#include "layout/layout.h"

namespace shardwright {

// The parts of a tensor dim of n elements that intersect a target: their number, and the elements of the target that
// they cover. Mesh dims in `varying` take every coordinate, others that of `position`.
struct AxisOverlap {
  int64_t elements = 0;
  int64_t parts = 0;
};

AxisOverlap overlap(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position, MeshDimSet varying,
                    const IntervalList& target);

// The same part by part; parts that have equally much in common with the target may be counted together.
void for_each_overlap(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position, MeshDimSet varying,
                      const IntervalList& target, const std::function<void(int64_t elements, int64_t times)>& visit);

// Returns the lengths of the parts into which the cuts divide a tensor dim of n elements, and how many parts have each
// length. Empty parts count too. `varying` and `position` as above.
std::map<int64_t, int64_t> part_lengths(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position,
                                        MeshDimSet varying);

}  // namespace shardwright
