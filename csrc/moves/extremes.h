// Which ranks must be looked at to know what the worst of all ranks does.
//
// Corners rest on an invariant of chunks: along a mesh dim the parts of one parent are full chunks first, then at most
// one short one, then empty ones. So parts are largest and smallest, and lie furthest from each other, at the first and
// the last coordinates: the corners.
//
// Classes of ranks rest on no invariant: each cut's rule (layout/cut_rule.h) says at which coordinates parts begin to
// look different, below each kind of parent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "moves/step.h"

namespace shardwright {

// The sets of mesh dims that are last, all others first, of the corners of a group: all of them for a few mesh dims;
// for many, those where all coordinates but one agree.
std::vector<MeshDimSet> corners_of(MeshDimSet mesh_dims);
// The position of a corner.
int64_t corner_position(const Mesh& mesh, MeshDimSet last);

// The corners of the group that `mesh_dims` make of the first position: of the first mesh dims, where all would be more
// than `at_most`.
std::vector<int64_t> corner_positions(const Mesh& mesh, MeshDimSet mesh_dims, size_t at_most);

// Whether ranks stand in the order of positions, in which first coordinates come first in every group.
bool ranks_ascend(const Mesh& mesh);

// More ranks than this are not looked at one by one.
constexpr int64_t kMaxRanksWalked = 4096;

// Some ranks, and for how many each of them stands.
struct RanksSeen {
  std::vector<int64_t> positions;
  std::vector<int64_t> weights;
  bool stand_for_all = true;  // else there may be others; weights mean nothing then
};

// The ranks of a mesh by what they hold, send and receive in some steps. The coordinates on each mesh dim are taken
// apart into stretches; ranks whose coordinates lie in the same stretches look alike.
//
//   S(0) -> R over a of 8, 10 rows: parts of 2 2 2 2 2 0 0 0 rows, stretches [0, 5) and [5, 8)
//   S(0) over a -> S(0) over b, 10 rows: every coordinate is a stretch of its own
//   S(0) over a -> S(1) over b, even: one stretch on each
class RankClasses {
 public:
  explicit RankClasses(const Mesh& mesh);

  // Takes apart what differs in what ranks hold in either layout, and what they have for each other. Both lie on the
  // mesh.
  void add(const Layout& before, const Layout& after);
  // The same for a step. `by_turn`: also whether a rank is first, last or in between in its
  // group, which decides what must be packed.
  void add(const Step& step, bool by_turn = false);
  void split_all(MeshDimSet mesh_dims);

  // One rank of each class; of more than `at_most` classes, those of the outermost and boundary coordinates.
  RanksSeen seen(int64_t at_most = kMaxRanksWalked) const;

 private:
  void add_tensor_dim(int64_t n, std::span<const Cut> before, std::span<const Cut> after);
  // By shapes of parts: the same lengths with the same gaps. Takes the shapes of the parents to those of the parts.
  void add_cuts(std::vector<IntervalList>& shapes, std::span<const Cut> cuts);
  void split_at(int mesh_dim, int64_t coordinate);
  RanksSeen product(const std::vector<std::vector<int64_t>>& coordinates) const;

  const Mesh& mesh_;
  std::vector<std::set<int64_t>> starts_;  // by mesh dim: of stretches, and one more for the end
  MeshDimSet each_apart_;                  // mesh dims whose coordinates are all stretches of their own
};

}  // namespace shardwright
