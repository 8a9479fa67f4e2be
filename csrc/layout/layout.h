// A layout: which elements of a global tensor each rank of a mesh holds, and where in its local tensor.
//
// A layout lists the cuts of each tensor dim in shard order. A rank's part of a tensor dim is the result of these cuts,
// one after the other, each by its rule and by local position (cut_rule.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "layout/cut_rule.h"
#include "layout/dtype.h"
#include "layout/mesh.h"
#include "layout/placement.h"
#include "layout/region.h"

namespace shardwright {

// One mesh dim cutting one tensor dim.
struct Cut {
  int mesh_dim = 0;
  CutRule rule;
  bool operator==(const Cut&) const = default;
};

// Returns the mesh dims that cut.
inline MeshDimSet dims_of(std::span<const Cut> cuts) {
  MeshDimSet dims;
  for (const Cut& cut : cuts) dims.insert(cut.mesh_dim);
  return dims;
}

// {tensor dim: mesh dims, first cut first}
using ShardOrder = std::map<int64_t, std::vector<int>>;

// The meaning of SS(d, f) (DTensorSpec.use_strided_shard_as_shard_order):
//   kOrder    it only encodes the order of plain cuts, as with FSDP on top of tensor parallelism
//   kLiteral  the tensor really is cut into f times as many pieces
//   kAuto     kOrder where the split factors can be decoded as an order, else kLiteral
enum class StridedMeaning { kAuto, kOrder, kLiteral };

// Returns the part of a tensor dim of n elements that the rank at `position` holds.
IntervalList part_at(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position);

// Returns whether every cut divides evenly, so that all ranks hold parts of the same length.
bool cuts_evenly(const Mesh& mesh, int64_t n, std::span<const Cut> cuts);

// A position that holds no less than any other; its coordinates on mesh dims that do not cut are the first.
int64_t largest_position(const Mesh& mesh, int64_t n, std::span<const Cut> cuts);

class Layout {
 public:
  // Larger layouts are rejected, so that byte counts do not overflow and the pieces of a part fit into memory.
  static constexpr int64_t kMaxBytesOnAllRanks = int64_t{1} << 57;
  static constexpr int64_t kMaxSplitFactor = int64_t{1} << 20;

  // Negative tensor dims count from the end. An empty shard_order, or a missing entry, means mesh order. Its
  // entries may leave out mesh dims of size 1.
  // Throws UserError that names the argument: placements (wrong number, tensor dim out of range, reductions that
  // cannot be combined, a dtype that cannot be reduced), shape or shard_order.
  //
  // The first `flattened` tensor dims are seen as one of all their elements, row-major, here and in local tensors;
  // tensor dims are then those of the flattened shape. So a cut may end in the middle of a row:
  //     (4, 6, 8) with flattened = 2 is (24, 8), and Ragged(0,10:14) cuts it after 10 rows of 8
  Layout(MeshPtr mesh, std::vector<int64_t> shape, DType dtype, std::vector<Placement> placements,
         const ShardOrder& shard_order = {}, StridedMeaning strided = StridedMeaning::kAuto, int flattened = 1);

  const Mesh& mesh() const { return *mesh_; }
  const MeshPtr& mesh_ptr() const { return mesh_; }
  const std::vector<int64_t>& shape() const { return shape_; }  // flattened
  // The shape of the tensor, of which the first `flattened` dims are one in shape().
  std::vector<int64_t> tensor_shape() const;
  int flattened() const { return leading_.empty() ? 1 : static_cast<int>(leading_.size()); }
  int ndim() const { return static_cast<int>(shape_.size()); }
  const DType& dtype() const { return dtype_; }
  const std::vector<Placement>& placements() const { return placements_; }
  // Cuts of a tensor dim, first cut first. Mesh dims of size 1 are left out, unless they have pieces in another order.
  const std::vector<Cut>& cuts(int tensor_dim) const { return cuts_[tensor_dim]; }
  const std::vector<std::vector<Cut>>& cuts() const { return cuts_; }
  int64_t num_elements() const;

  // Mesh dims larger than 1 that cut a tensor dim, that have a pending reduction, and that do neither.
  MeshDimSet cut_dims() const { return cut_dims_; }
  MeshDimSet partial_dims() const { return partial_dims_; }
  MeshDimSet replicated_dims() const;

  // The part of the rank at `position`; for P, the elements it holds a contribution to.
  Region region(int64_t position) const;
  // The indices of one tensor dim that the rank has.
  IntervalList part(int tensor_dim, int64_t position) const;
  // Returns whether all rules are partitions (cut_rule.h), so that on a mesh dim that cuts each element is on one
  // coordinate.
  bool is_partition() const;
  // Returns whether all ranks' parts have the same shape.
  bool has_equal_parts() const;
  std::vector<int64_t> local_shape(int64_t position) const { return shape_of(region(position)); }
  // A position that holds no less than any other.
  int64_t largest_position() const;
  int64_t largest_part_elements() const { return shardwright::num_elements(region(largest_position())); }
  int64_t largest_part_bytes() const { return largest_part_elements() * dtype_.size_bytes(); }
  // Ranks outside the mesh hold nothing: their local tensor has no elements, as in DTensor.
  std::vector<int64_t> local_shape_of_rank(Rank rank) const;

  // The same tensor and mesh with other cuts and partials. `cuts` must name each mesh dim at most once.
  Layout with(std::vector<std::vector<Cut>> cuts, const std::vector<Placement>& partials) const;

  // The same cuts of fewer elements: those with these indices on a tensor dim; the list ascends. Each rank has those
  // elements of its part. Indices, shape() and cuts() stay those of the whole tensor, so what is known of its cuts says
  // nothing about the lengths of parts. Regions and local shapes are those of what is left.
  Layout restricted_to(int tensor_dim, IntervalList indices) const;
  bool is_restricted() const { return indices_ != nullptr; }
  // Returns what is left of a list of indices of a tensor dim.
  IntervalList restricted(int tensor_dim, IntervalList list) const;

  // Returns "[S(0), R]", or with the order of cuts if it is not mesh order: "[S(0)#1, S(0)#0]".
  std::string placements_string() const;
  // "float32[64, 64] on dp=2,tp=4 as [S(0), R]"
  std::string to_string() const;

  // Returns whether mesh, tensor, cuts in their order and reductions due are equal, and so what every rank holds.
  bool operator==(const Layout& other) const;
  size_t hash() const;

 private:
  void derive_dim_sets();

  MeshPtr mesh_;
  std::vector<int64_t> shape_;
  std::vector<int64_t> leading_;  // the sizes of dims that are flattened; empty: none are
  DType dtype_;
  std::vector<Placement> placements_;
  std::vector<std::vector<Cut>> cuts_;
  MeshDimSet cut_dims_;
  MeshDimSet partial_dims_;
  // If some elements are left out: the tensor dim and the indices that are left.
  int restricted_dim_ = 0;
  std::shared_ptr<const IntervalList> indices_;
};

// Returns whether a move between two layouts of one tensor is a rearrangement (exchange/indexed_exchange.h): where one
// of them is no partition, or they flatten otherwise.
bool needs_rearrangement(const Layout& a, const Layout& b);

}  // namespace shardwright
