// A device mesh: an n-D grid of ranks with named dims, as in torch's DeviceMesh.
//
// A *position* is the row-major index into the grid; a *rank* is the global rank at that position. They differ on
// slices of larger meshes. All geometry is computed with the positions of one mesh. Programs use ranks, which denote
// the same process on every mesh. A *group* over some mesh dims is a set of positions that differ only in these dims.
#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "layout/rank.h"

namespace shardwright {

// A set of mesh dims, bit i for mesh dim i. Mesh dims must be in [0, kMaxDims).
class MeshDimSet {
 public:
  static constexpr int kMaxDims = 32;

  constexpr MeshDimSet() = default;
  static constexpr MeshDimSet single(int mesh_dim) { return MeshDimSet(uint32_t{1} << mesh_dim); }
  static constexpr MeshDimSet from_bits(uint32_t bits) { return MeshDimSet(bits); }

  constexpr bool contains(int mesh_dim) const { return (bits_ >> mesh_dim) & 1u; }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr int count() const { return std::popcount(bits_); }
  constexpr uint32_t bits() const { return bits_; }
  void insert(int mesh_dim) { bits_ |= uint32_t{1} << mesh_dim; }
  void erase(int mesh_dim) { bits_ &= ~(uint32_t{1} << mesh_dim); }
  std::vector<int> to_vector() const;  // ascending

  constexpr MeshDimSet operator|(MeshDimSet other) const { return MeshDimSet(bits_ | other.bits_); }
  constexpr MeshDimSet operator&(MeshDimSet other) const { return MeshDimSet(bits_ & other.bits_); }
  constexpr MeshDimSet operator-(MeshDimSet other) const { return MeshDimSet(bits_ & ~other.bits_); }
  constexpr bool operator==(MeshDimSet other) const { return bits_ == other.bits_; }

 private:
  explicit constexpr MeshDimSet(uint32_t bits) : bits_(bits) {}
  uint32_t bits_ = 0;
};

struct Topology;  // the links between ranks and their costs (cost/topology.h)

class Mesh {
 public:
  // Maximum number of ranks. At this size, a plan, its certificate and a rank's program take a few seconds and a GiB.
  static constexpr int64_t kMaxSize = int64_t{1} << 20;

  // `ranks` are in row-major order, one per position, distinct and not negative; empty means 0, 1, 2, ... Throws
  // UserError if they are not, if there are no dims or more than MeshDimSet::kMaxDims, if the number of names differs
  // from that of sizes, if names repeat, are empty or not UTF-8, if sizes are below 1, or if there are more than
  // kMaxSize ranks.
  Mesh(std::vector<std::string> dim_names, std::vector<int64_t> dim_sizes, const std::vector<int64_t>& ranks = {},
       std::shared_ptr<const Topology> topology = nullptr);

  int ndim() const { return static_cast<int>(dim_sizes_.size()); }
  int64_t size() const { return size_; }
  int64_t dim_size(int mesh_dim) const { return dim_sizes_[mesh_dim]; }
  const std::vector<int64_t>& dim_sizes() const { return dim_sizes_; }
  const std::vector<std::string>& dim_names() const { return dim_names_; }
  // Returns the number of ranks in a group over these mesh dims: the product of their sizes, 1 for no mesh dims.
  // Ignores mesh dims that the mesh lacks.
  int64_t group_size(MeshDimSet mesh_dims) const;

  Rank rank_at(Position position) const { return ranks_.empty() ? Rank{position} : ranks_[position]; }
  std::vector<Rank> ranks() const;                                          // by position
  std::vector<Rank> ranks_at(const std::vector<int64_t>& positions) const;  // in the order of `positions`
  // True if every rank equals its position: ranks 0, 1, 2, ... in row-major order.
  bool ranks_are_positions() const { return ranks_.empty(); }
  // Returns nullopt if the rank is not part of the mesh.
  std::optional<Position> position_of(Rank rank) const;

  // Returns the coordinates of a position, one per mesh dim.
  std::vector<int64_t> coordinates(int64_t position) const;
  // Returns the coordinates on `mesh_dims`, in the given order, as one row-major index: the last dim varies fastest.
  int64_t coordinate_index(int64_t position, const std::vector<int>& mesh_dims) const {
    int64_t index = 0;
    for (const int d : mesh_dims) index = index * dim_sizes_[d] + coordinate(position, d);
    return index;
  }
  // Returns the coordinate on one mesh dim.
  int64_t coordinate(int64_t position, int mesh_dim) const {
    return position / strides_[mesh_dim] % dim_sizes_[mesh_dim];
  }
  // Returns the difference of two positions whose coordinates differ by 1 on `mesh_dim` and agree elsewhere.
  int64_t stride(int mesh_dim) const { return strides_[mesh_dim]; }

  // Returns the positions that differ from `position` only in `mesh_dims`, including itself, by ascending rank. All
  // process groups of this library have their members in this order. Ignores mesh dims that the mesh lacks.
  std::vector<int64_t> group(int64_t position, MeshDimSet mesh_dims) const;

  // The links between the ranks if the user gave them, else null. Geometry ignores the topology: layouts that differ
  // only in it are equal. Plans depend on it: planning/context.h reads it once, and it is part of every planning
  // context. Python caches with layouts as keys compare it too (same_topology in cost/topology.h).
  const std::shared_ptr<const Topology>& topology() const { return topology_; }

  // Returns "dp=2,tp=4".
  std::string to_string() const;
  // Returns the names joined by '+' in mesh order: "dp+tp"; "" for no mesh dims.
  std::string names_of(MeshDimSet mesh_dims) const;

  // True if names, sizes and ranks are equal. Ignores the topology.
  bool operator==(const Mesh& other) const;

 private:
  std::vector<std::string> dim_names_;
  std::vector<int64_t> dim_sizes_;
  std::vector<int64_t> strides_;
  std::vector<Rank> ranks_;                              // by position; empty if every rank equals its position
  std::unordered_map<Rank, Position> position_of_rank_;  // empty if ranks_ is
  std::shared_ptr<const Topology> topology_;
  bool ranks_ascend_ = true;  // a higher position has a higher rank
  int64_t size_ = 1;          // number of ranks
};

// Returns the ranks of both meshes, ascending, each once.
std::vector<Rank> ranks_of(const Mesh& a, const Mesh& b);

using MeshPtr = std::shared_ptr<const Mesh>;

}  // namespace shardwright
