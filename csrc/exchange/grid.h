// A layout without partials as a grid of parts over tensor dims, and the overlaps of two grids.
//
// An *axis shard* is a part of one tensor dim: one combination of coordinates on the mesh dims that cut it. A part of
// the tensor has one shard of each tensor dim. The ranks that hold the part differ in the other mesh dims. They are its
// replicas, numbered in mesh order. Parts are numbered too: by their shards, row-major, the last tensor dim fastest.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "layout/layout.h"
#include "layout/rank.h"
#include "layout/selection.h"

namespace shardwright {

// A dim of a grid: the indices [begin, begin + length) of a tensor dim. With kNoDim it has the single index 0, and
// belongs to no tensor dim.
struct Window {
  static constexpr int kNoDim = -1;

  int tensor_dim = kNoDim;
  int64_t begin = 0;
  int64_t length = 1;
};

// The parts of a layout, and the ranks that hold each part.
class Grid {
 public:
  // Throws InvariantError if the layout has partials.
  explicit Grid(const Layout& layout);
  // The grid of a box of the tensor, as if the box were a tensor of its own. Dim i of the grid is windows[i]. Every
  // tensor dim must be in exactly one window. Throws InvariantError if the layout has partials.
  Grid(const Layout& layout, const std::vector<Window>& windows);

  int ndim() const { return static_cast<int>(lists_.size()); }
  // Returns the indices of each axis shard of a dim of the grid. Indices count from the beginning of the dim's window.
  const std::vector<IntervalList>& lists(int tensor_dim) const { return lists_[tensor_dim]; }
  // Returns the number of replicas of each part.
  int64_t replicas() const { return replicas_; }
  int64_t parts() const { return mesh_->size() / replicas_; }

  // The part that a rank holds, in [0, parts()), and the rank's index among the part's replicas.
  struct PartReplica {
    int64_t part = 0;
    int64_t replica = 0;
    bool operator==(const PartReplica&) const = default;
  };
  PartReplica part_replica_at(int64_t position) const { return part_replicas_[position]; }
  // Returns nullopt if the rank is not part of the mesh.
  std::optional<PartReplica> part_replica_of(Rank rank) const;
  // Returns the rank with this index among the replicas of the part with these axis shards.
  Rank rank_at(std::span<const int64_t> shards, int64_t replica) const;
  const Mesh& mesh() const { return *mesh_; }

  // Returns the axis shards of a part, by tensor dim. The span is valid as long as the grid.
  std::span<const int64_t> shards_of(int64_t part) const {
    return std::span<const int64_t>(shards_).subspan(part * lists_.size(), lists_.size());
  }
  // Returns the part with these axis shards.
  int64_t part_of(std::span<const int64_t> shards) const;
  // Returns the indices of a part, by tensor dim.
  Region region(int64_t part) const;
  // Returns, for each dim of the grid, the tensor dim and the local position of its first index in the part.
  std::vector<LocalAxis> local_axes(int64_t part) const;

 private:
  void number_parts();  // fills shards_ and part_replicas_

  MeshPtr mesh_;
  std::vector<std::vector<int>> cutting_;  // by tensor dim: the mesh dims that cut it, in order
  std::vector<int> replicating_;           // mesh dims that cut nothing
  int64_t replicas_ = 1;
  std::vector<std::vector<IntervalList>> lists_;       // by tensor dim and shard: its indices
  std::vector<int> tensor_dims_;                       // by dim of the grid
  std::vector<std::vector<int64_t>> first_positions_;  // by dim and shard: the window's offset in the local part
  std::vector<int64_t> shards_;                        // by part and tensor dim
  std::vector<PartReplica> part_replicas_;             // by position
};

// The pairs of axis shards of two grids that have indices in common, on one tensor dim.
//
// Example: the source has the shards [0, 6) [6, 12), and the destination [0, 4) [4, 8) [8, 12).
//
//   of_src(0)    {shard 0, elements 4, before 0, index 0} {shard 1, elements 2, before 4, index 0}
//   of_dst(1)    {shard 0, elements 2, before 0, index 1} {shard 1, elements 2, before 2, index 0}
class ShardOverlaps {
 public:
  // `src` and `dst` are Grid::lists() of the two grids for the tensor dim. Shards of `src` must not overlap; throws
  // InvariantError where it finds that they do.
  ShardOverlaps(const std::vector<IntervalList>& src, const std::vector<IntervalList>& dst);

  // An entry in the list of a shard: a shard of the other grid that has indices in common with it.
  struct Overlap {
    int64_t shard = 0;     // the shard of the other grid
    int64_t elements = 0;  // number of common elements, above 0
    int64_t before = 0;    // the sum of `elements` of the earlier entries of the list
    int64_t index = 0;     // index of the mirrored entry in the other shard's list
  };
  // Returns the overlaps of one shard, ascending by the other grid's shard.
  std::span<const Overlap> of_src(int64_t shard) const { return of_src_.of(shard); }
  std::span<const Overlap> of_dst(int64_t shard) const { return of_dst_.of(shard); }
  // Returns the number of pairs of shards that have indices in common.
  int64_t num_pairs() const { return static_cast<int64_t>(of_src_.all.size()); }
  // Returns the sum of `elements` of a list.
  static int64_t elements_of(std::span<const Overlap> overlaps) {
    return overlaps.empty() ? 0 : overlaps.back().before + overlaps.back().elements;
  }
  // Returns the entry of of_src(src_shard) for `dst_shard`; null if the two shards have no index in common.
  const Overlap* between(int64_t src_shard, int64_t dst_shard) const;

 private:
  // The lists of all shards, one after the other.
  struct Lists {
    std::vector<Overlap> all;
    std::vector<size_t> begins;  // by shard, and the end of the last list
    std::span<const Overlap> of(int64_t shard) const {
      return std::span<const Overlap>(all).subspan(begins[shard], begins[shard + 1] - begins[shard]);
    }
  };
  Lists of_src_;
  Lists of_dst_;
};

}  // namespace shardwright
