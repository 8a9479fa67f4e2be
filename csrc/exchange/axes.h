// Layouts as parts of one grid of axes, where elements may lie on several coordinates of a mesh dim, in any order, or
// the leading tensor dims are flattened on one side only.
//
// A tensor dim is an *axis*; tensor dims that one side flattens are one axis of all their elements on both sides; and a
// mesh dim whose reduction is due before and after is an axis that this mesh dim cuts, because each of its coordinates
// has a tensor of its own. A *slot* of an axis is one combination of coordinates on the mesh dims that cut it, and has
// the list of elements that they hold, in local order. A part is one slot of each axis; its *holders* are the ranks
// that have these slots.
#pragma once

#include <cstdint>
#include <vector>

#include "exchange/index_map.h"
#include "layout/layout.h"
#include "layout/selection.h"

namespace shardwright {

struct AxisGrid {
  struct Axis {
    std::vector<int> mesh_dims;       // that cut it, the first cut first
    std::vector<IntervalList> lists;  // by slot: the indices that may move
    // By slot, of a map alone: all that the local tensor has, in local order, where the axis lies there. Elements that
    // do not move have indices that no other list has.
    std::vector<IntervalList> placed;
    std::vector<LocalAxis> local;
  };

  MeshPtr mesh;
  std::vector<Axis> axes;
  std::vector<std::vector<int64_t>> slots;  // by position and axis

  // Returns what may move of the part at a position, by axis.
  Region region(int64_t position) const { return region(position, &Axis::lists); }
  // Returns all that the part has. The local tensor is the row-major product of the lists.
  Region local_region(int64_t position) const;
  std::vector<LocalAxis> local_axes(int64_t position) const;

 private:
  Region region(int64_t position, std::vector<IntervalList> Axis::* lists) const;
};

struct AxisGrids {
  AxisGrid src;
  AxisGrid dst;
};

// Returns the mesh dims whose reductions are due before and after a move between two layouts, on one mesh.
MeshDimSet kept_partials(const Layout& src, const Layout& dst);

// Returns both layouts on the same axes. They must be of one tensor. Throws UserError if a part that is flattened keeps
// more than CutRule::kMaxRuns runs (what repeats is kept once).
AxisGrids axis_grids(const Layout& src, const Layout& dst);

// Returns the axes of what a map moves: those of the map, except that those which a side flattens are one axis, of all
// their combinations, row-major, in the order of that side. The dtypes may differ. Throws UserError if a part that is
// flattened has too many runs of what is moved.
//
//   source (4, 6), flattened, to rows 4 to 7 of a fused (12, 6):   one axis of 24
//   source (4, 6), flattened, to columns 2 and 3 of (4, 4):        one axis of 8, of which a row of the source has 2
AxisGrids axis_grids(const Layout& src, const Layout& dst, const IndexMap& map);  // mapped_axes.cpp

}  // namespace shardwright
