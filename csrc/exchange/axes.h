// Two layouts as parts of one grid of axes. The grid covers layouts in which an element may be stored on several
// coordinates of a mesh dim or in any order, and layouts of which only one flattens the leading tensor dims.
//
// An *axis* is a tensor dim. Tensor dims that one side flattens form one axis of all their elements on both sides. A
// mesh dim whose reduction is pending before and after is an axis too, which the mesh dim itself cuts: each of its
// coordinates has a tensor of its own. An *axis shard* is the list of indices of the axis that ranks with one
// combination of coordinates on the cutting mesh dims store, in local order. A part is one shard of each axis. The
// *candidate senders* of a part of the source are the ranks that have its shards.
//
// Example: (4, 6, 8) elements, of which the source flattens the first two dims and cuts them by a=2 as
// Ragged(0,10:14), and the destination cuts dim 1 by a. Both sides have two axes: axis 0 of 24 elements and axis 1
// of 8. On axis 0 the source's shards are [0, 10) and [10, 24), and the destination's are [0, 3) [6, 9) [12, 15) [18,
// 21) and [3, 6) [9, 12) [15, 18) [21, 24). On axis 1 both sides have the one shard [0, 8).
#pragma once

#include <cstdint>
#include <vector>

#include "exchange/index_map.h"
#include "layout/layout.h"
#include "layout/selection.h"

namespace shardwright {

// One layout of a move, as parts of a grid of axes.
struct AxisGrid {
  // An axis. Axis shards are numbered by the coordinates on its mesh dims, row-major.
  struct Axis {
    std::vector<int> mesh_dims;  // the mesh dims that cut the axis, in order of the cuts
    // By axis shard: its indices, in local order. With an index map, only indices of elements that move.
    std::vector<IntervalList> lists;
    // Only with an index map, by axis shard: the indices of all elements of the local tensor along the axis, in local
    // order. Elements that do not move have indices that are in no other list.
    std::vector<IntervalList> local_lists;
    std::vector<LocalAxis> local_axes;  // only with an index map, by axis shard: its dims in the local tensor
  };

  MeshPtr mesh;
  std::vector<Axis> axes;  // without an index map: the mesh dims that stay pending, then the tensor dims, ascending
  std::vector<std::vector<int64_t>> shards;  // by position and axis: the index of the rank's axis shard in Axis::lists

  // Returns, by axis, the indices that the rank at a position holds; with an index map, only indices that move.
  Region region(int64_t position) const { return region(position, &Axis::lists); }
  // Returns, by axis, all indices that the rank at a position holds. Its local tensor is the row-major product of these
  // lists.
  Region local_region(int64_t position) const;
  // Returns, by axis, the dims that form the axis in the local tensor at a position. Only with an index map.
  std::vector<LocalAxis> local_axes(int64_t position) const;

 private:
  // Returns, by axis, the entry of `lists` for the rank's axis shard.
  Region region(int64_t position, std::vector<IntervalList> Axis::* lists) const;
};

// Both layouts of a move, on the same axes.
struct AxisGrids {
  AxisGrid src;
  AxisGrid dst;
};

// Returns the mesh dims whose reductions are pending both before and after a move; none if the meshes differ.
MeshDimSet kept_partials(const Layout& src, const Layout& dst);

// Returns both layouts on the same axes. A reduction that is pending on one side only is ignored: its ranks count as
// replicas. Throws InvariantError if the shapes or dtypes of the tensors differ. Throws UserError if a flattened part
// has more than CutRule::kMaxRuns runs; a repeating block counts once.
AxisGrids axis_grids(const Layout& src, const Layout& dst);

// Returns the axes of an index map. Axes of the map that one side flattens form one axis of all their combinations,
// row-major, in the order of that side. The map must fit both tensor shapes (IndexMap::check). The dtypes may differ,
// and pending reductions are ignored. Throws UserError if a flattened part has more than CutRule::kMaxRuns runs.
//
//   source (4, 6), flattened, to rows 4 to 7 of a fused (12, 6):   one axis of 24
//   source (4, 6), flattened, to columns 2 and 3 of (4, 4):        one axis of 8; a row of the source has 2 of them
AxisGrids axis_grids(const Layout& src, const Layout& dst, const IndexMap& map);  // mapped_axes.cpp

}  // namespace shardwright
