// Two layouts as parts of one grid of axes. The grid covers layouts in which an element may be stored on several
// coordinates of a mesh dim or in any order, and layouts of which only one flattens the leading tensor dims.
//
// An *axis* is a tensor dim. Tensor dims that one side flattens form one axis of all their elements on both sides. A
// mesh dim whose reduction is pending before and after is an axis that this mesh dim cuts, because each of its
// coordinates has a tensor of its own. An *axis shard* is one combination of coordinates on the mesh dims that cut the
// axis. It has the list of the elements that these ranks store, in local order. A part is one shard of each axis. Its
// *candidate senders* are the ranks that have these shards.
#pragma once

#include <cstdint>
#include <vector>

#include "exchange/index_map.h"
#include "layout/layout.h"
#include "layout/selection.h"

namespace shardwright {

struct AxisGrid {
  struct Axis {
    std::vector<int> mesh_dims;       // the mesh dims that cut the axis, in order of the cuts
    std::vector<IntervalList> lists;  // by axis shard: the indices that may move
    // Only with a map, by axis shard: all elements of the local tensor along the axis, in local order. Elements that do
    // not move have indices that no other list has.
    std::vector<IntervalList> placed;
    std::vector<LocalAxis> local;
  };

  MeshPtr mesh;
  std::vector<Axis> axes;
  std::vector<std::vector<int64_t>> shards;  // axis shards by position and axis

  // Returns the elements that may move of the part at a position, by axis.
  Region region(int64_t position) const { return region(position, &Axis::lists); }
  // Returns all elements of the part. The local tensor is the row-major product of the lists.
  Region local_region(int64_t position) const;
  std::vector<LocalAxis> local_axes(int64_t position) const;

 private:
  Region region(int64_t position, std::vector<IntervalList> Axis::* lists) const;
};

struct AxisGrids {
  AxisGrid src;
  AxisGrid dst;
};

// Returns the mesh dims whose reductions are pending both before and after a move on one mesh.
MeshDimSet kept_partials(const Layout& src, const Layout& dst);

// Returns both layouts on the same axes. They must describe the same tensor. Throws UserError if a flattened part has
// more than CutRule::kMaxRuns runs, where a repeating block counts once.
AxisGrids axis_grids(const Layout& src, const Layout& dst);

// Returns the axes of an index map. Axes of the map that one side flattens form one axis of all their combinations,
// row-major, in the order of that side. The dtypes may differ. Throws UserError if a flattened part has more than
// CutRule::kMaxRuns runs.
//
//   source (4, 6), flattened, to rows 4 to 7 of a fused (12, 6):   one axis of 24
//   source (4, 6), flattened, to columns 2 and 3 of (4, 4):        one axis of 8; a row of the source has 2 of them
AxisGrids axis_grids(const Layout& src, const Layout& dst, const IndexMap& map);  // mapped_axes.cpp

}  // namespace shardwright
