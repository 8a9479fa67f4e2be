// Chooses a few ranks that include the one with the largest cost (bytes, messages, memory), so that most ranks need not
// be examined.
//
// The *parent* of a part is the list of indices that the last cut of the part divides.
//
// Corners rely on an invariant of most rules: along a mesh dim, the parts of one parent descend (CutRule::descends):
// full chunks, then a short one, then empty ones. So the largest and the smallest parts, and the parts furthest from
// each other, are at the first and the last coordinates: the corners. Along mesh dims whose parts do not descend,
// Corners examines more ranks.
//
// RankClasses do not need this invariant: each cut's rule (layout/cut_rule.h) returns the coordinates at which the
// shape of parts changes, for each kind of parent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "moves/step.h"

namespace shardwright {

// Returns the corners of a group over `mesh_dims`. A corner is given as the set of mesh dims with the last coordinate;
// the other mesh dims have the first. For up to five mesh dims these are all corners; for more, only the corners with
// at most one last coordinate, or at most one first coordinate.
std::vector<MeshDimSet> corners_of(MeshDimSet mesh_dims);
// Returns the position of a corner, given as above.
int64_t corner_position(const Mesh& mesh, MeshDimSet last);

// A rank to examine. On mesh dims whose parts do not descend, it has the coordinates of the position `base`. On other
// mesh dims, it has the last coordinate if the mesh dim is in `last`, else the first.
struct Corner {
  uint32_t last = 0;  // bits of a MeshDimSet
  uint32_t base = 0;  // a position
};

// The ranks to examine for the maxima over all ranks of a move between some lists of cuts.
//
// Example: a mesh a=3, b=2, and a move over both.
//   a and b cut into chunks          the coordinates (0, 0), (0, 1), (2, 0) and (2, 1)
//   a cuts into 3, 1 and 4 rows      the parts do not descend along a, so all six ranks: (0, 0), (0, 1), ..., (2, 1)
class Corners {
 public:
  // The mesh must outlive the object.
  explicit Corners(const Mesh& mesh) : mesh_(mesh) {}

  // Adds a list of cuts of n elements. Along mesh dims that cut it into parts that do not descend, all coordinates are
  // examined. If these have more than 64 combinations over all such mesh dims, only the first, the last and those with
  // the largest and the smallest parts are examined.
  void add(int64_t n, std::span<const Cut> cuts);

  // Returns the ranks to examine for a move over these mesh dims. Along mesh dims whose parts do not descend, they
  // include all coordinates to examine, even if the move does not span them.
  std::vector<Corner> of(MeshDimSet mesh_dims) const;
  // Returns the corner that agrees with `corner` on `mesh_dims` and has the first coordinate on all other mesh dims.
  Corner projected(Corner corner, MeshDimSet mesh_dims) const {
    return {corner.last & mesh_dims.bits(), corner.base == 0 ? 0 : projected_base(corner.base, mesh_dims)};
  }
  // Returns the position of a corner.
  int64_t position(Corner corner) const {
    return corner_position(mesh_, MeshDimSet::from_bits(corner.last)) + corner.base;
  }

 private:
  // Returns the position that has the coordinates of `base` on mesh dims whose parts do not descend, if they are in
  // `mesh_dims`, and coordinate 0 on all other mesh dims.
  uint32_t projected_base(uint32_t base, MeshDimSet mesh_dims) const;

  const Mesh& mesh_;
  std::map<int, std::set<int64_t>> examined_;  // coordinates to examine, by mesh dim whose parts do not descend
  MeshDimSet non_descending_dims_;             // the keys of examined_
  std::vector<uint32_t> bases_{0};             // positions with all combinations of the coordinates to examine
};

// Returns the positions of the corners of position 0's group over `mesh_dims`. If there would be more than `max_ranks`,
// returns those over the first mesh dims.
std::vector<int64_t> corner_positions(const Mesh& mesh, MeshDimSet mesh_dims, size_t max_ranks);

// Returns true if ranks ascend with positions. Then the members of every group are in the order of their coordinates.
bool ranks_ascend(const Mesh& mesh);

// Maximum number of ranks that are examined one by one; more ranks are represented by a sample.
constexpr int64_t kMaxRanksExamined = 4096;

// Some positions, and the number of ranks that each of them represents (its weight).
struct RankSample {
  std::vector<int64_t> positions;
  std::vector<int64_t> weights;
  bool is_complete = true;  // false if some ranks may not be represented; then weights have no meaning
};

// Classes of the ranks of a mesh that hold, send and receive the same amounts in some steps. The coordinates of each
// mesh dim are split into ranges; ranks whose coordinates are in the same ranges are in the same class.
//
//   S(0) -> R over a of 8, 10 rows: parts of 2 2 2 2 2 0 0 0 rows, ranges [0, 5) and [5, 8)
//   S(0) over a -> S(0) over b, 10 rows: every coordinate is a range of its own
//   S(0) over a -> S(1) over b, both even: one range on a, one range on b
class RankClasses {
 public:
  // Puts all ranks of the mesh into one class. The mesh must outlive the object.
  explicit RankClasses(const Mesh& mesh);

  // Separates ranks that hold or exchange different amounts in a move between these layouts, which are on the mesh.
  void add(const Layout& before, const Layout& after);
  // Separates ranks that hold or exchange different amounts in a step. With `by_order`, also separates the first, the
  // last and the inner ranks of a group, because the order of members decides what must be packed.
  void add(const Step& step, bool by_order = false);
  // Makes every coordinate of these mesh dims a range of its own.
  void split_all(MeshDimSet mesh_dims);

  // Returns one rank of each class. If there are more than `max_ranks` classes, the sample is incomplete: at most
  // `max_ranks` ranks, at the outermost coordinates and at the starts of ranges.
  RankSample sample(int64_t max_ranks = kMaxRanksExamined) const;

 private:
  // Separates ranks that hold or exchange different amounts of one tensor dim, which has n elements.
  void add_tensor_dim(int64_t n, std::span<const Cut> before, std::span<const Cut> after);
  // Begins a range of a mesh dim of `cuts` wherever the *shape* of the parts changes: the list of their indices, moved
  // to begin at 0. `shapes` has the different shapes that the cuts divide; it is replaced by those of the resulting
  // parts. Example: a cut of [0, 10) into chunks over a=4 makes parts of 3, 3, 3 and 1 indices. Ranges begin at 0 and
  // 3, and the shapes become [0, 3) and [0, 1).
  void split_by_shape(std::vector<IntervalList>& shapes, std::span<const Cut> cuts);
  // Begins a range of a mesh dim at this coordinate. Does nothing for 0 and the size of the mesh dim.
  void split_at(int mesh_dim, int64_t coordinate);
  // Returns the ranks at all combinations of these coordinates, by mesh dim. Weights are right only if the coordinates
  // are the starts of all ranges.
  RankSample product(const std::vector<std::vector<int64_t>>& coordinates) const;

  const Mesh& mesh_;
  std::vector<std::set<int64_t>> starts_;  // starts of ranges, and the end of the last one, by mesh dim
  MeshDimSet split_dims_;                  // mesh dims where every coordinate is its own range
};

}  // namespace shardwright
