// Finds cuts of given dims under which every rank holds exactly the elements that it already has.
//
// This is the general way to find the layout of a view (views/view.h): for one group of dims, and for uneven cuts of
// any rules. It compares the elements of the ranks at each combination of coordinates.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// The elements of a group of dims that each rank holds, as indices into the flattened group.
struct Holdings {
  const Mesh& mesh;            // must outlive the object
  std::vector<int> mesh_dims;  // the mesh dims that cut the group
  // One position per combination of coordinates on mesh_dims, row-major. Coordinates on other mesh dims are 0.
  std::vector<int64_t> positions;
  std::vector<IntervalList> lists;  // the elements of the rank at each of these positions
};

constexpr int64_t kMaxIntervalsCompared = int64_t{1} << 22;  // limit for all lists of Holdings together

// Returns the holdings of a group with these sizes of dims and these cuts of each dim. Returns nullopt if they take
// more than kMaxIntervalsCompared intervals. The mesh must outlive the result.
std::optional<Holdings> holdings_of(const Mesh& mesh, const std::vector<int64_t>& dims,
                                    const std::vector<std::vector<Cut>>& cuts);

// The reason why no cuts fit.
struct NoFit {
  std::string reason;
  std::vector<int> to_split;  // mesh dims that would have to cut several dims; cuts may fit once these are split
};

// Returns cuts of each of `dims` that give every rank exactly its elements in `holdings`, in their order, or the reason
// why there are none. Tries all assignments of mesh dims to dims, all orders of the mesh dims that cut one dim, at most
// six of them, and all rules (layout/cut_rule.h), chunks and strided rules first. If `dims` is empty, there are none. A
// rule that is not a partition is found only if it is the only cut of its dim.
//
// Example: dims (5, 4) on a=2, the first cut into chunks. Rank 0 holds the elements [0, 12) and rank 1 [12, 20).
//   dims (20)      a cuts the dim into blocks of 4
//   dims (5, 4)    a cuts the first dim into chunks
//   dims (2, 10)   no cuts: [0, 12) is row 0 and two elements of row 1, not a product of parts of the dims
std::variant<std::vector<std::vector<Cut>>, NoFit> fitting_cuts(const Holdings& holdings,
                                                                const std::vector<int64_t>& dims);

}  // namespace shardwright
