// Finds the cuts of a list of dims that give every rank the elements that it holds.
//
// This is the general way to find the layout of a view: it looks at what each combination of coordinates holds, and
// needs neither even cuts nor rules of one kind.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// The elements that the ranks hold of a group of dims, seen as one list of all their elements.
struct Holdings {
  const Mesh& mesh;
  std::vector<int> mesh_dims;       // those that cut it
  std::vector<int64_t> positions;   // on the mesh, by coordinates on mesh_dims, row-major; the other coordinates are 0
  std::vector<IntervalList> lists;  // what the rank at each of these positions holds
};

// Lists of more intervals than this in all are not made.
constexpr int64_t kMaxIntervalsCompared = int64_t{1} << 22;

// Returns what the ranks hold of `dims` with these cuts, or nothing if that takes too many intervals.
std::optional<Holdings> holdings_of(const Mesh& mesh, const std::vector<int64_t>& dims,
                                    const std::vector<std::vector<Cut>>& cuts);

// Why no cuts fit, and the mesh dims that would have to cut several dims: where these are split, some may.
struct NoFit {
  std::string reason;
  std::vector<int> to_split;
};

// Returns the cuts of each of `dims` with which every rank holds the product of its parts, in the order of the list, or
// why there are none. Tries all ways to assign mesh dims to dims, all orders of the mesh dims that cut one dim, and all
// rules (layout/cut_rule.h); of these, chunks and strided ones first. A rule that is no partition is only found where
// it alone cuts its dim.
std::variant<std::vector<std::vector<Cut>>, NoFit> fitting_cuts(const Holdings& held, const std::vector<int64_t>& dims);

}  // namespace shardwright
