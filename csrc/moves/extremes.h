// The ranks that must be examined to find the worst of all.
//
// Corners rely on an invariant of most rules: along a mesh dim, the parts of one parent descend (CutRule::descends), as
// full chunks, a short one and empty ones do. So the largest and the smallest parts, and those furthest from each
// other, are at the first and the last coordinates: the corners. Along mesh dims whose parts do not descend, Corners
// examines more ranks.
//
// Classes of ranks rely on no invariant: each cut's rule (layout/cut_rule.h) tells at which coordinates the shape of
// parts changes, for each kind of parent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "moves/step.h"

namespace shardwright {

// Returns the corners of a group, each as the set of mesh dims whose coordinate is the last; all other coordinates are
// first. For a few mesh dims these are all corners; for many, only those where all coordinates but one agree.
std::vector<MeshDimSet> corners_of(MeshDimSet mesh_dims);
// Returns the position of a corner.
int64_t corner_position(const Mesh& mesh, MeshDimSet last);

// A rank to look at: the mesh dims on which it is last, all others first. On mesh dims whose parts do not descend it
// has the coordinates of the position `base` instead.
struct Corner {
  uint32_t last = 0;
  uint32_t base = 0;
};

// The ranks to look at for what the worst of all ranks does in a move between some lists of cuts.
class Corners {
 public:
  explicit Corners(const Mesh& mesh) : mesh_(mesh) {}

  // One of the lists, of n elements. Along mesh dims that cut it into parts that do not descend, all coordinates are
  // looked at; where these are many, those that have the most and the least.
  void add(int64_t n, std::span<const Cut> cuts);

  std::vector<Corner> of(MeshDimSet mesh_dims) const;
  // The same with first coordinates but on these mesh dims.
  Corner on(Corner corner, MeshDimSet mesh_dims) const {
    return {corner.last & mesh_dims.bits(), corner.base == 0 ? 0 : base_on(corner.base, mesh_dims)};
  }
  int64_t position(Corner corner) const {
    return corner_position(mesh_, MeshDimSet::from_bits(corner.last)) + corner.base;
  }

 private:
  uint32_t base_on(uint32_t base, MeshDimSet mesh_dims) const;

  const Mesh& mesh_;
  std::map<int, std::set<int64_t>> extremes_;  // by mesh dim whose parts do not descend: coordinates with most or least
  MeshDimSet steep_dims_;                      // those mesh dims
  std::vector<uint32_t> bases_{0};
};

// The corners of the group that `mesh_dims` make of the first position: of the first mesh dims, where all would be more
// than `at_most`.
std::vector<int64_t> corner_positions(const Mesh& mesh, MeshDimSet mesh_dims, size_t at_most);

// Returns whether ranks ascend with positions, so that in every group the members are in the order of coordinates.
bool ranks_ascend(const Mesh& mesh);

// More ranks than this are not examined one by one.
constexpr int64_t kMaxRanksWalked = 4096;

// Some ranks, and how many ranks each of them represents.
struct RanksSeen {
  std::vector<int64_t> positions;
  std::vector<int64_t> weights;
  bool stand_for_all = true;  // if false, some ranks may not be represented, and weights have no meaning
};

// Classes of the ranks of a mesh that hold, send and receive the same amounts in some steps. The coordinates of each
// mesh dim are split into stretches; ranks whose coordinates are in the same stretches belong to the same class.
//
//   S(0) -> R over a of 8, 10 rows: parts of 2 2 2 2 2 0 0 0 rows, stretches [0, 5) and [5, 8)
//   S(0) over a -> S(0) over b, 10 rows: every coordinate is a stretch of its own
//   S(0) over a -> S(1) over b, even: one stretch on each
class RankClasses {
 public:
  explicit RankClasses(const Mesh& mesh);

  // Separates ranks that hold different amounts in either layout, or exchange different amounts. Both layouts are on
  // the mesh.
  void add(const Layout& before, const Layout& after);
  // The same for a step. With `by_turn`, also separates the first, the last and the inner ranks of a group, because the
  // order of members decides what must be packed.
  void add(const Step& step, bool by_turn = false);
  void split_all(MeshDimSet mesh_dims);

  // Returns one rank of each class; if there are more than `at_most` classes, those at outermost and boundary
  // coordinates.
  RanksSeen seen(int64_t at_most = kMaxRanksWalked) const;

 private:
  void add_tensor_dim(int64_t n, std::span<const Cut> before, std::span<const Cut> after);
  // Splits by the shapes of parts (their lengths and gaps). Replaces the parents' shapes by those of the parts.
  void add_cuts(std::vector<IntervalList>& shapes, std::span<const Cut> cuts);
  void split_at(int mesh_dim, int64_t coordinate);
  RanksSeen product(const std::vector<std::vector<int64_t>>& coordinates) const;

  const Mesh& mesh_;
  std::vector<std::set<int64_t>> starts_;  // by mesh dim: where stretches start, and the end of the last
  MeshDimSet each_apart_;                  // mesh dims where every coordinate is its own stretch
};

}  // namespace shardwright
