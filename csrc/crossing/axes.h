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

#include "layout/layout.h"

namespace shardwright {

struct AxisGrid {
  struct Axis {
    std::vector<int> mesh_dims;       // that cut it, the first cut first
    std::vector<IntervalList> lists;  // by slot
  };

  MeshPtr mesh;
  std::vector<Axis> axes;
  std::vector<std::vector<int64_t>> slots;  // by position and axis

  // Returns what the part at a position has of each axis. The local tensor is their row-major product.
  Region region(int64_t position) const;
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

}  // namespace shardwright
