// A layout: which elements of a global tensor each rank of a mesh holds, and where in its local tensor.
//
// A layout lists the cuts of each tensor dim in shard order. To get a rank's *part* of a tensor dim, the indices that
// the rank holds, the cuts are applied one after the other. Each rule (cut_rule.h) divides the list that the cuts
// before it left. Example: 8 rows as [S(0), S(0)] on a=2,b=2; the rank at a=1, b=0 gets [4, 8), then [4, 6) of it.
//
// A *position* is the row-major index of a rank on the mesh (mesh.h). A mesh dim with P is *partial*: its reduction is
// pending.
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

// A cut of a tensor dim by a mesh dim.
struct Cut {
  int mesh_dim = 0;
  CutRule rule;
  bool operator==(const Cut&) const = default;
};

// Returns the mesh dims that make these cuts.
inline MeshDimSet dims_of(std::span<const Cut> cuts) {
  MeshDimSet dims;
  for (const Cut& cut : cuts) dims.insert(cut.mesh_dim);
  return dims;
}

// Maps a tensor dim to the mesh dims that cut it, first cut first.
using ShardOrder = std::map<int64_t, std::vector<int>>;

// The meaning of SS(d, f) (DTensorSpec.use_strided_shard_as_shard_order):
//   kOrder    f only encodes the order of plain cuts, as with FSDP on top of tensor parallelism
//   kLiteral  the tensor really is cut into f times as many pieces
//   kAuto     kOrder where the split factors can be decoded as an order, else kLiteral
enum class StridedMeaning { kAuto, kOrder, kLiteral };

// Returns the part of a tensor dim of n elements that the rank at `position` holds.
IntervalList part_at(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position);

// True if every cut divides evenly, so that all ranks hold parts of the same length.
bool cuts_evenly(const Mesh& mesh, int64_t n, std::span<const Cut> cuts);

// Returns a position with a largest part. Its coordinates on mesh dims that do not cut are 0.
int64_t largest_position(const Mesh& mesh, int64_t n, std::span<const Cut> cuts);

class Layout {
 public:
  // Maximum number of bytes if every rank held the full tensor. Byte counts up to it cannot overflow.
  static constexpr int64_t kMaxBytesOnAllRanks = int64_t{1} << 57;
  static constexpr int64_t kMaxSplitFactor = int64_t{1} << 20;  // so that the pieces of a part fit into memory

  // `placements` has one item per mesh dim. Negative tensor dims count from the end. An empty shard_order, or a missing
  // entry, means mesh order. Entries may leave out mesh dims of size 1. If a shard_order is given, SS(d, f) is literal,
  // whatever `strided` is.
  // Throws UserError that names the argument: placements (wrong number, tensor dim out of range, a rule that cannot cut
  // its list, split factors that encode no order with kOrder, reductions that cannot be combined, a dtype that cannot
  // be reduced), shape, flattened or shard_order.
  //
  // The first `flattened` tensor dims are flattened into one, row-major, in shape() and in local tensors. Tensor dims
  // are then numbered in the flattened shape. So a cut may end in the middle of a row:
  //     (4, 6, 8) with flattened = 2 is (24, 8), and Ragged(0,10:14) cuts it after 10 rows of 8
  Layout(MeshPtr mesh, std::vector<int64_t> shape, DType dtype, std::vector<Placement> placements,
         const ShardOrder& shard_order = {}, StridedMeaning strided = StridedMeaning::kAuto, int64_t flattened = 1);

  const Mesh& mesh() const { return *mesh_; }
  const MeshPtr& mesh_ptr() const { return mesh_; }
  const std::vector<int64_t>& shape() const { return shape_; }  // flattened
  // Returns the shape before flattening.
  std::vector<int64_t> tensor_shape() const;
  // Returns the number of leading tensor dims that are flattened into one; 1 if none are.
  int flattened() const { return leading_.empty() ? 1 : static_cast<int>(leading_.size()); }
  int ndim() const { return static_cast<int>(shape_.size()); }
  const DType& dtype() const { return dtype_; }
  const std::vector<Placement>& placements() const { return placements_; }
  // The cuts of a tensor dim in shard order. Mesh dims of size 1 are left out unless their rule is not a partition.
  const std::vector<Cut>& cuts(int tensor_dim) const { return cuts_[tensor_dim]; }
  const std::vector<std::vector<Cut>>& cuts() const { return cuts_; }
  // Returns the number of elements of the global tensor. A restricted layout counts only the kept indices.
  int64_t num_elements() const;

  MeshDimSet cut_dims() const { return cut_dims_; }          // mesh dims in cuts()
  MeshDimSet partial_dims() const { return partial_dims_; }  // mesh dims of size above 1 with a pending reduction
  MeshDimSet replicated_dims() const;                        // mesh dims of size above 1 that are in neither set

  // Returns the parts of the rank at `position`, by tensor dim. With P, the rank has a contribution to each element.
  Region region(int64_t position) const;
  // Returns the part of one tensor dim that the rank at `position` holds.
  IntervalList part(int tensor_dim, int64_t position) const;
  // True if all rules are partitions (cut_rule.h). Then each element is on one coordinate of every mesh dim that cuts.
  bool is_partition() const;
  // True only if every cut divides evenly, so that all local tensors have the same shape. False if restricted.
  bool has_equal_parts() const;
  std::vector<int64_t> local_shape(int64_t position) const { return shape_of(region(position)); }
  // Returns the position of a rank whose local tensor is at least as large as any other.
  int64_t largest_position() const;
  int64_t largest_part_elements() const { return shardwright::num_elements(region(largest_position())); }
  int64_t largest_part_bytes() const { return largest_part_elements() * dtype_.size_bytes(); }
  // Returns {0} for ranks outside the mesh, as in DTensor.
  std::vector<int64_t> local_shape_of_rank(Rank rank) const;

  // Returns a layout of the same tensor and mesh with these cuts, by tensor dim, and with the pending reductions in
  // `partials`, which has one placement per mesh dim; those that are not P are ignored. Throws InvariantError if a mesh
  // dim has two cuts, or a cut and a reduction. Does not check that the rules can cut their lists (CutRule::why_not).
  Layout with(std::vector<std::vector<Cut>> cuts, const std::vector<Placement>& partials) const;

  // Returns this layout restricted to these indices of a tensor dim, in ascending order. Throws InvariantError if this
  // layout is restricted or is not a partition. Each rank keeps the elements of its part with these indices; regions
  // and local shapes are those of the kept elements. Indices, shape() and cuts() stay those of the full tensor, so
  // lengths of parts cannot be derived from the cuts.
  Layout restricted_to(int tensor_dim, IntervalList indices) const;
  bool is_restricted() const { return indices_ != nullptr; }
  // Returns those indices of `list` that the restriction keeps, or all if the layout or `tensor_dim` is not restricted.
  IntervalList kept_indices(int tensor_dim, IntervalList list) const;

  // Returns "[S(0), R]", or with the order of cuts if it is not mesh order: "[S(0)#1, S(0)#0]".
  std::string placements_string() const;
  // Returns "float32[64, 64] on dp=2,tp=4 as [S(0), R]".
  std::string to_string() const;

  // True if mesh, shape, flattening, dtype, cuts in order, pending reductions and restriction are equal. Then every
  // rank holds the same elements. If false, ranks may still hold the same elements (same_parts in moves/spans.h).
  bool operator==(const Layout& other) const;
  size_t hash() const;

 private:
  void derive_dim_sets();  // sets cut_dims_ and partial_dims_

  MeshPtr mesh_;
  std::vector<int64_t> shape_;
  std::vector<int64_t> leading_;  // sizes of the flattened dims; empty if none are flattened
  DType dtype_;
  std::vector<Placement> placements_;
  std::vector<std::vector<Cut>> cuts_;  // by tensor dim, in shard order
  MeshDimSet cut_dims_;
  MeshDimSet partial_dims_;
  // The tensor dim and the kept indices of a restricted layout. indices_ is null if the layout is not restricted.
  int restricted_dim_ = 0;
  std::shared_ptr<const IntervalList> indices_;
};

// True if a move between two layouts of one tensor is a rearrangement (exchange/indexed_exchange.h): one of them is not
// a partition, or they flatten different numbers of dims.
bool needs_rearrangement(const Layout& a, const Layout& b);

}  // namespace shardwright
