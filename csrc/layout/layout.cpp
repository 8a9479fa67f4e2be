#include "layout/layout.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "support/error.h"

namespace shardwright {
namespace {

// Throws UserError if a size is negative, or if the tensor on all ranks of the mesh exceeds kMaxBytesOnAllRanks.
void check_shape(const Mesh& mesh, const std::vector<int64_t>& shape, const DType& dtype) {
  int64_t bytes = mesh.size() * dtype.size_bytes();
  for (const int64_t size : shape) {
    if (size < 0) throw UserError(concat("shape must have sizes of at least 0, got (", join(shape), ")"));
    if (size > 0 && bytes > Layout::kMaxBytesOnAllRanks / size) {
      throw UserError(concat("shape must have at most 2^57 bytes if every rank holds the full tensor, got (",
                             join(shape), ") of ", dtype.name(), " on ", mesh.size(), " ranks"));
    }
    bytes *= std::max(size, int64_t{1});
  }
}

// Returns the error for a rule that cannot cut. Inserts its placement and mesh dim into `reason` (CutRule::why_not):
// "placements: coordinate of Owned(0,2) on mesh dim 'x' must be in [0, 1], got 2".
UserError error_of(const std::string& reason, const std::string& placement, const std::string& mesh_dim) {
  const size_t subject = reason.find(" must ");
  return UserError(concat("placements: ", reason.substr(0, subject), " of ", placement, " on mesh dim '", mesh_dim, "'",
                          reason.substr(subject)));
}

// Returns the placements with negative tensor dims normalized. Throws UserError on placements that are impossible for
// this shape.
std::vector<Placement> checked_placements(const Mesh& mesh, const std::vector<int64_t>& shape, const DType& dtype,
                                          std::vector<Placement> placements) {
  check_user(static_cast<int>(placements.size()) == mesh.ndim(), "placements must have one item per mesh dim, ",
             mesh.ndim(), " for the mesh ", mesh, ", got ", placements.size());
  const auto ndim = static_cast<int64_t>(shape.size());
  for (int d = 0; d < mesh.ndim(); ++d) {
    Placement& placement = placements[d];
    if (placement.is_shard_like()) {
      check_argument(ndim > 0, "placements", "R or P for a tensor without dims", placement, " on mesh dim '",
                     mesh.dim_names()[d], "'");
      check_user(placement.dim >= -ndim && placement.dim < ndim, "placements: tensor dim of ", placement,
                 " on mesh dim '", mesh.dim_names()[d], "' must be ", InRange{-ndim, ndim - 1}, ", got ",
                 placement.dim);
      const int64_t split_factor = placement.is_plain_shard() ? placement.rule.split_factor() : 1;
      check_user(split_factor >= 1 && split_factor <= Layout::kMaxSplitFactor, "placements: split factor of ",
                 placement, " must be ", InRange{1, Layout::kMaxSplitFactor}, ", got ", split_factor);
      const std::string reason = placement.rule.why_not_over(mesh.dim_size(d));
      if (!reason.empty()) throw error_of(reason, placement.to_string(), mesh.dim_names()[d]);
      if (placement.dim < 0) placement.dim += ndim;
    } else if (placement.is_partial()) {
      check_user(placement.op != ReduceOp::kNorm || (std::isfinite(placement.norm_power) && placement.norm_power != 0),
                 "placements: norm power of ", placement, " must be a finite number other than 0, got ",
                 placement.norm_power);
      const std::string reason = why_not_reducible(placement.op, dtype);
      check_user(reason.empty(), reason, " (placements: ", placement, " on mesh dim '", mesh.dim_names()[d], "')");
    }
  }
  return placements;
}

// Throws UserError if pending reductions have different ops, except sum with avg: other ops do not commute, so the
// order of the reductions would matter.
void check_partials_mix(const std::vector<Placement>& placements) {
  const Placement* first = nullptr;
  for (const Placement& placement : placements) {
    if (!placement.is_partial()) continue;
    if (first == nullptr) first = &placement;
    const auto is_linear = [](const Placement& p) { return p.op == ReduceOp::kSum || p.op == ReduceOp::kAvg; };
    const bool commutes = placement == *first || (is_linear(placement) && is_linear(*first));
    check_user(commutes, "placements must have pending reductions of one op, or of sum and avg, got ", *first, " and ",
               placement);
  }
}

// DTensor encodes the order of cuts in split factors: the factor of a mesh dim is the product of the sizes of the mesh
// dims that cut before it although they come later in the mesh. So this function visits the mesh dims from right to
// left and inserts each at the place that gives its factor. Example: on mesh (2,2), [SS(0,2), S(0)] means that mesh dim
// 1 cuts first (factor 1), and mesh dim 0 after it (factor 2). Returns nullopt if the factors encode no order.
std::optional<ShardOrder> decode_order(const Mesh& mesh, const std::vector<Placement>& placements) {
  ShardOrder order;
  for (int d = mesh.ndim() - 1; d >= 0; --d) {
    if (!placements[d].is_shard_like()) continue;
    if (!placements[d].is_plain_shard()) return std::nullopt;
    std::vector<int>& mesh_dims = order[placements[d].dim];
    int64_t factor = 1;
    size_t at = 0;
    while (factor != placements[d].rule.split_factor()) {
      if (at == mesh_dims.size()) return std::nullopt;
      factor *= mesh.dim_size(mesh_dims[at++]);
    }
    mesh_dims.insert(mesh_dims.begin() + static_cast<int64_t>(at), d);
  }
  return order;
}

// Throws UserError unless the order lists exactly the mesh dims that cut each of its tensor dims.
void check_order(const Mesh& mesh, const std::vector<Placement>& placements, int ndim, const ShardOrder& order) {
  for (const auto& [tensor_dim, mesh_dims] : order) {
    check_argument(tensor_dim >= 0 && tensor_dim < ndim, "shard_order: tensor dim", IndexInRange{ndim, "tensor dims"},
                   tensor_dim);
    std::vector<int> expected;
    for (int d = 0; d < mesh.ndim(); ++d) {
      if (placements[d].is_shard_like() && placements[d].dim == tensor_dim) expected.push_back(d);
    }
    // Mesh dims of size 1 cut nothing, so an order may leave them out.
    std::vector<int> listed = mesh_dims;
    for (const int d : expected) {
      if (mesh.dim_size(d) == 1 && std::find(listed.begin(), listed.end(), d) == listed.end()) listed.push_back(d);
    }
    std::sort(listed.begin(), listed.end());
    if (listed == expected) continue;
    throw UserError(concat("shard_order: mesh dims of tensor dim ", tensor_dim, " must be a permutation of (",
                           join(expected), "), got (", join(mesh_dims), ")"));
  }
}

// Throws UserError if a rule cannot cut a part that the earlier cuts make. Follows one part of each length through the
// cuts. Strided rules can cut every list, so strided cuts at the end are not checked.
void check_rules_fit(const Mesh& mesh, int64_t n, const std::vector<Cut>& cuts, int tensor_dim) {
  size_t end = cuts.size();
  while (end > 0 && cuts[end - 1].rule.is_strided_or_chunks()) --end;
  if (end == 0) return;
  std::map<int64_t, int64_t> positions{{n, 0}};  // length of a part -> a position with such a part
  for (size_t i = 0; i < end; ++i) {
    const auto& [mesh_dim, rule] = cuts[i];
    const int64_t k = mesh.dim_size(mesh_dim);
    std::map<int64_t, int64_t> finer;
    for (const auto& [length, position] : positions) {
      const std::string reason = rule.why_not(length, k);
      if (!reason.empty()) {
        std::string where = concat(" (tensor dim ", tensor_dim);
        for (size_t j = 0; j < i; ++j) {
          const int d = cuts[j].mesh_dim;
          where += concat(j == 0 ? ", the part at " : ", ", mesh.dim_names()[d], "=", mesh.coordinate(position, d));
        }
        throw error_of(concat(reason, where, ")"), rule.text(tensor_dim), mesh.dim_names()[mesh_dim]);
      }
      for (int64_t c = 0; c < k && i + 1 < end; ++c) {
        finer.try_emplace(rule.length(length, k, c), position + c * mesh.stride(mesh_dim));
      }
    }
    positions = std::move(finer);
  }
}

}  // namespace

Layout::Layout(MeshPtr mesh, std::vector<int64_t> shape, DType dtype, std::vector<Placement> placements,
               const ShardOrder& shard_order, StridedMeaning strided, int64_t flattened)
    : mesh_(std::move(mesh)), shape_(std::move(shape)), dtype_(std::move(dtype)) {
  check_shape(*mesh_, shape_, dtype_);
  check_argument(flattened == 1 || (flattened > 1 && flattened <= ndim()), "flattened", InRange{1, std::max(ndim(), 1)},
                 flattened);
  if (flattened > 1) {
    leading_.assign(shape_.begin(), shape_.begin() + flattened);
    shape_.erase(shape_.begin(), shape_.begin() + flattened - 1);
    shape_[0] = 1;
    for (const int64_t size : leading_) shape_[0] *= size;
  }
  placements_ = checked_placements(*mesh_, shape_, dtype_, std::move(placements));
  check_partials_mix(placements_);

  const bool has_strided = std::any_of(placements_.begin(), placements_.end(),
                                       [](const Placement& p) { return p.kind == PlacementKind::kStridedShard; });
  ShardOrder order = shard_order;
  if (has_strided && strided != StridedMeaning::kLiteral && order.empty()) {
    const std::optional<ShardOrder> decoded = decode_order(*mesh_, placements_);
    if (!decoded && strided != StridedMeaning::kAuto) {
      throw UserError(concat("placements must have split factors that encode an order of cuts, got ",
                             placements_string(), " on ", *mesh_, "; pass strided=\"literal\" if they count pieces"));
    }
    if (decoded) {
      order = *decoded;
      for (Placement& placement : placements_) {
        if (placement.kind == PlacementKind::kStridedShard) placement = Placement::shard(placement.dim);
      }
    }
  }
  check_order(*mesh_, placements_, ndim(), order);

  cuts_.resize(shape_.size());
  for (int t = 0; t < ndim(); ++t) {
    const auto found = order.find(t);
    const bool has_order = found != order.end();
    std::vector<int> mesh_dims = has_order ? found->second : std::vector<int>();
    for (int d = 0; d < mesh_->ndim(); ++d) {
      const bool is_listed = std::find(mesh_dims.begin(), mesh_dims.end(), d) != mesh_dims.end();
      if (is_listed || !placements_[d].is_shard_like() || placements_[d].dim != t) continue;
      // An order may leave out mesh dims of size 1. Their place in it matters only if their rule is not a partition.
      if (!has_order || !placements_[d].rule.is_partition()) mesh_dims.push_back(d);
    }
    for (const int d : mesh_dims) cuts_[t].push_back({d, placements_[d].rule});
    check_rules_fit(*mesh_, shape_[t], cuts_[t], t);
    // Over one coordinate, a partition changes nothing. Another rule may reorder elements.
    std::erase_if(cuts_[t], [&](const Cut& c) { return mesh_->dim_size(c.mesh_dim) == 1 && c.rule.is_partition(); });
  }
  derive_dim_sets();
}

Layout Layout::with(std::vector<std::vector<Cut>> cuts, const std::vector<Placement>& partials) const {
  Layout other = *this;
  other.placements_.assign(mesh_->ndim(), Placement::replicate());
  for (int t = 0; t < ndim(); ++t) {
    for (const Cut& c : cuts[t]) {
      check_invariant(other.placements_[c.mesh_dim].is_replicate(), "mesh dim ", c.mesh_dim, " has two cuts");
      other.placements_[c.mesh_dim] = Placement::cut(t, c.rule);
    }
  }
  for (int d = 0; d < mesh_->ndim(); ++d) {
    if (!partials[d].is_partial()) continue;
    check_invariant(other.placements_[d].is_replicate(), "mesh dim ", d, " has both a cut and a pending reduction");
    other.placements_[d] = partials[d];
  }
  other.cuts_ = std::move(cuts);
  other.derive_dim_sets();
  return other;
}

void Layout::derive_dim_sets() {
  cut_dims_ = {};
  partial_dims_ = {};
  for (const std::vector<Cut>& list : cuts_) cut_dims_ = cut_dims_ | dims_of(list);
  for (int d = 0; d < mesh_->ndim(); ++d) {
    if (placements_[d].is_partial() && mesh_->dim_size(d) > 1) partial_dims_.insert(d);
  }
}

MeshDimSet Layout::replicated_dims() const {
  MeshDimSet dims;
  for (int d = 0; d < mesh_->ndim(); ++d) {
    if (mesh_->dim_size(d) > 1 && !cut_dims_.contains(d) && !partial_dims_.contains(d)) dims.insert(d);
  }
  return dims;
}

std::vector<int64_t> Layout::tensor_shape() const {
  if (leading_.empty()) return shape_;
  std::vector<int64_t> shape = leading_;
  shape.insert(shape.end(), shape_.begin() + 1, shape_.end());
  return shape;
}

bool Layout::is_partition() const {
  return std::all_of(cuts_.begin(), cuts_.end(), [](const std::vector<Cut>& cuts) {
    return std::all_of(cuts.begin(), cuts.end(), [](const Cut& c) { return c.rule.is_partition(); });
  });
}

bool needs_rearrangement(const Layout& a, const Layout& b) {
  return a.flattened() != b.flattened() || !a.is_partition() || !b.is_partition();
}

int64_t Layout::num_elements() const {
  int64_t total = 1;
  for (int t = 0; t < ndim(); ++t) {
    total *= is_restricted() && t == restricted_dim_ ? shardwright::length(*indices_) : shape_[t];
  }
  return total;
}

IntervalList part_at(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position) {
  IntervalList list;  // the part after the cuts so far
  append(list, {0, n});
  for (const Cut& c : cuts) {
    list = c.rule.part(list, mesh.dim_size(c.mesh_dim), mesh.coordinate(position, c.mesh_dim));
  }
  return list;
}

IntervalList Layout::part(int tensor_dim, int64_t position) const {
  return kept_indices(tensor_dim, part_at(*mesh_, shape_[tensor_dim], cuts_[tensor_dim], position));
}

Region Layout::region(int64_t position) const {
  Region region;
  for (int t = 0; t < ndim(); ++t) region.push_back(part(t, position));
  return region;
}

Layout Layout::restricted_to(int tensor_dim, IntervalList indices) const {
  check_invariant(!is_restricted() && is_partition(), "only an unrestricted partition can be restricted, not ", *this);
  Layout fewer = *this;
  fewer.restricted_dim_ = tensor_dim;
  fewer.indices_ = std::make_shared<IntervalList>(std::move(indices));
  return fewer;
}

IntervalList Layout::kept_indices(int tensor_dim, IntervalList list) const {
  if (!is_restricted() || tensor_dim != restricted_dim_) return list;
  return shared_indices(list, *indices_);
}

bool cuts_evenly(const Mesh& mesh, int64_t n, std::span<const Cut> cuts) {
  for (const Cut& c : cuts) {
    const int64_t k = mesh.dim_size(c.mesh_dim);
    if (!c.rule.cuts_evenly(n, k)) return false;
    n /= k;
  }
  return true;
}

bool Layout::has_equal_parts() const {
  if (is_restricted()) return false;
  for (int t = 0; t < ndim(); ++t) {
    if (!cuts_evenly(*mesh_, shape_[t], cuts_[t])) return false;
  }
  return true;
}

// Follows the largest part through the cuts. Before a rule that may make larger parts of a shorter list (CutRule:
// longer_lists_have_larger_parts), it follows one part of each length instead.
int64_t largest_position(const Mesh& mesh, int64_t n, std::span<const Cut> cuts) {
  size_t first_to_follow = cuts.size();
  while (first_to_follow > 0 && cuts[first_to_follow - 1].rule.longer_lists_have_larger_parts()) --first_to_follow;
  std::map<int64_t, int64_t> positions{{n, 0}};  // length of a part -> a position with such a part
  for (size_t i = 0; i < cuts.size(); ++i) {
    const CutRule& rule = cuts[i].rule;
    const int64_t k = mesh.dim_size(cuts[i].mesh_dim);
    const int64_t stride = mesh.stride(cuts[i].mesh_dim);
    std::map<int64_t, int64_t> finer;
    for (const auto& [length, position] : positions) {
      const bool follows_all = i + 1 < first_to_follow;
      const int64_t largest = follows_all ? 0 : rule.coordinate_of_largest(length, k);
      for (int64_t c = largest; c < (follows_all ? k : largest + 1); ++c) {
        finer.try_emplace(rule.length(length, k, c), position + c * stride);
      }
    }
    if (i + 1 >= first_to_follow) finer.erase(finer.begin(), std::prev(finer.end()));
    positions = std::move(finer);
  }
  return positions.rbegin()->second;
}

// Every mesh dim cuts at most one tensor dim, so one position has a largest part of every tensor dim.
int64_t Layout::largest_position() const {
  int64_t position = 0;
  for (int t = 0; t < ndim(); ++t) {
    const std::vector<Cut>& cuts = cuts_[t];
    if (is_restricted() && t == restricted_dim_) {
      const std::vector<int64_t> all = mesh_->group(0, dims_of(cuts));
      const auto has_less = [&](int64_t a, int64_t b) {
        return shardwright::length(part(t, a)) < shardwright::length(part(t, b));
      };
      position += *std::max_element(all.begin(), all.end(), has_less);
      continue;
    }
    // The first chunk is the largest, so position 0 has a largest part.
    const bool all_chunks = std::all_of(cuts.begin(), cuts.end(), [](const Cut& c) { return c.rule.is_chunks(); });
    if (!all_chunks) position += shardwright::largest_position(*mesh_, shape_[t], cuts);
  }
  return position;
}

std::vector<int64_t> Layout::local_shape_of_rank(Rank rank) const {
  const std::optional<Position> position = mesh_->position_of(rank);
  return position ? local_shape(*position) : std::vector<int64_t>{0};
}

std::string Layout::placements_string() const {
  std::vector<std::string> parts;
  for (int d = 0; d < mesh_->ndim(); ++d) {
    std::string text = placements_[d].to_string();
    if (placements_[d].is_shard_like() && !cuts_.empty()) {
      const std::vector<Cut>& list = cuts_[placements_[d].dim];
      const bool in_mesh_order =
          std::is_sorted(list.begin(), list.end(), [](const Cut& a, const Cut& b) { return a.mesh_dim < b.mesh_dim; });
      for (size_t i = 0; i < list.size() && !in_mesh_order; ++i) {
        if (list[i].mesh_dim == d) text += concat("#", i);
      }
    }
    parts.push_back(std::move(text));
  }
  return concat("[", join(parts), "]");
}

std::string Layout::to_string() const {
  const std::string dims = leading_.empty() ? "" : concat(", the first ", leading_.size(), " dims as one");
  return concat(dtype_.name(), "[", join(tensor_shape()), "]", dims, " on ", mesh_->to_string(), " as ",
                placements_string());
}

bool Layout::operator==(const Layout& other) const {
  if (!(shape_ == other.shape_ && leading_ == other.leading_ && dtype_ == other.dtype_ && cuts_ == other.cuts_ &&
        *mesh_ == *other.mesh_))
    return false;
  if (is_restricted() != other.is_restricted()) return false;
  if (is_restricted() && !(restricted_dim_ == other.restricted_dim_ && *indices_ == *other.indices_)) return false;
  for (int d = 0; d < mesh_->ndim(); ++d) {
    const bool is_partial = partial_dims_.contains(d);
    if (is_partial != other.partial_dims_.contains(d)) return false;
    if (is_partial && !(placements_[d] == other.placements_[d])) return false;
  }
  return true;
}

size_t Layout::hash() const {
  size_t hash = static_cast<size_t>(dtype_.size_bytes()) * 64 + dtype_.name().size();
  const auto mix = [&](int64_t value) { hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15u; };
  for (const int64_t size : mesh_->dim_sizes()) mix(size);
  for (const int64_t size : shape_) mix(size);
  for (const std::vector<Cut>& cuts : cuts_) {
    mix(static_cast<int64_t>(cuts.size()));
    for (const Cut& c : cuts)
      mix(static_cast<int64_t>(c.rule.hash() * MeshDimSet::kMaxDims + static_cast<size_t>(c.mesh_dim)));
  }
  mix(partial_dims_.bits());
  return hash ^ (hash >> 32);
}

}  // namespace shardwright
