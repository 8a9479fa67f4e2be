#include "moves/rank_classes.h"

#include <algorithm>
#include <optional>
#include <span>

#include "exchange/digits.h"

namespace shardwright {
namespace {

constexpr int kMaxDimsWithAllCorners = 5;  // maximum number of mesh dims whose 2^d corners are all examined
// All coordinates on the mesh dims whose parts do not descend are examined if they have at most this many combinations.
constexpr int64_t kMaxCombinations = 64;
// Limits on the distinct shapes of parts of a tensor dim, and on the pieces of one parent's parts. Above them every
// coordinate becomes a range of its own.
constexpr size_t kMaxShapes = 24;
constexpr int64_t kMaxPiecesCompared = 4096;

}  // namespace

std::vector<MeshDimSet> corners_of(MeshDimSet mesh_dims) {
  std::vector<MeshDimSet> corners;
  if (mesh_dims.count() <= kMaxDimsWithAllCorners) {
    uint32_t subset = 0;  // goes through all subsets of the bits of mesh_dims
    do {
      corners.push_back(MeshDimSet::from_bits(subset));
      subset = (subset - mesh_dims.bits()) & mesh_dims.bits();
    } while (subset != 0);
    return corners;
  }
  corners = {MeshDimSet(), mesh_dims};
  for (const int d : mesh_dims.to_vector()) {
    corners.push_back(MeshDimSet::single(d));
    corners.push_back(mesh_dims - MeshDimSet::single(d));
  }
  return corners;
}

int64_t corner_position(const Mesh& mesh, MeshDimSet last) {
  int64_t position = 0;
  for (const int d : last.to_vector()) position += (mesh.dim_size(d) - 1) * mesh.stride(d);
  return position;
}

// Collects the coordinates to examine along mesh dims whose parts do not descend, and combines them into bases_.
void Corners::add(int64_t n, std::span<const Cut> cuts) {
  bool is_new = false;
  for (const auto& [mesh_dim, rule] : cuts) {
    if (rule.descends()) continue;
    const int64_t k = mesh_.dim_size(mesh_dim);
    for (const int64_t c : {int64_t{0}, rule.coordinate_of_largest(n, k), rule.coordinate_of_smallest(n, k), k - 1}) {
      is_new = examined_[mesh_dim].insert(c).second || is_new;
    }
    non_descending_dims_.insert(mesh_dim);
  }
  if (!is_new) return;
  const bool examines_all = mesh_.group_size(non_descending_dims_) <= kMaxCombinations;
  bases_ = {0};
  for (const auto& [mesh_dim, some_coordinates] : examined_) {
    std::set<int64_t> coordinates = some_coordinates;
    for (int64_t c = 0; c < mesh_.dim_size(mesh_dim) && examines_all; ++c) coordinates.insert(c);
    std::vector<uint32_t> more;
    for (const uint32_t base : bases_) {
      for (const int64_t c : coordinates) more.push_back(base + static_cast<uint32_t>(c * mesh_.stride(mesh_dim)));
    }
    bases_ = std::move(more);
  }
}

std::vector<Corner> Corners::of(MeshDimSet mesh_dims) const {
  const std::vector<MeshDimSet> lasts = corners_of(mesh_dims - non_descending_dims_);
  std::vector<Corner> all;
  all.reserve(bases_.size() * lasts.size());
  for (const uint32_t base : bases_) {
    for (const MeshDimSet last : lasts) all.push_back({last.bits(), base});
  }
  return all;
}

uint32_t Corners::projected_base(uint32_t base, MeshDimSet mesh_dims) const {
  uint32_t position = 0;
  for (const int d : (non_descending_dims_ & mesh_dims).to_vector()) {
    position += static_cast<uint32_t>(mesh_.coordinate(base, d) * mesh_.stride(d));
  }
  return position;
}

std::vector<int64_t> corner_positions(const Mesh& mesh, MeshDimSet mesh_dims, size_t max_ranks) {
  std::vector<int64_t> positions{0};
  for (const int d : mesh_dims.to_vector()) {
    const size_t count = positions.size();
    if (d >= mesh.ndim() || mesh.dim_size(d) == 1 || 2 * count > max_ranks) continue;
    for (size_t i = 0; i < count; ++i) positions.push_back(positions[i] + (mesh.dim_size(d) - 1) * mesh.stride(d));
  }
  return positions;
}

bool ranks_ascend(const Mesh& mesh) {
  if (mesh.ranks_are_positions()) return true;
  for (int64_t p = 1; p < mesh.size(); ++p) {
    if (mesh.rank_at(Position{p}) < mesh.rank_at(Position{p - 1})) return false;
  }
  return true;
}

RankClasses::RankClasses(const Mesh& mesh) : mesh_(mesh) {
  for (int d = 0; d < mesh.ndim(); ++d) starts_.push_back({0, mesh.dim_size(d)});
}

void RankClasses::split_at(int mesh_dim, int64_t coordinate) {
  if (coordinate > 0 && coordinate < mesh_.dim_size(mesh_dim)) starts_[mesh_dim].insert(coordinate);
}

void RankClasses::split_all(MeshDimSet mesh_dims) {
  for (int d = 0; d < mesh_.ndim(); ++d) {
    if (mesh_dims.contains(d)) split_dims_.insert(d);
  }
}

void RankClasses::add(const Layout& before, const Layout& after) {
  for (int t = 0; t < before.ndim(); ++t) add_tensor_dim(before.shape()[t], before.cuts(t), after.cuts(t));
}

void RankClasses::add(const Step& step, bool by_order) {
  add(step.before, step.after);
  // The data that a replica sends depends on its index among the replicas.
  if (step.policy != ReplicaPolicy::kAligned) split_all(step.mesh_dims);
  if (!by_order) return;
  for (const int d : step.mesh_dims.to_vector()) {
    const std::set<int64_t> starts = starts_[d];
    split_at(d, 1);
    for (const int64_t start : starts) split_at(d, start - 1);  // the last rank of a range may be the last with data
  }
}

// If both lists have digits that match, ranks differ only along ties. Otherwise, splits by the shapes of the parts that
// the common first cuts make. If only one list has more cuts, splits by the shapes of their parts too. If both have
// more, every coordinate on the mesh dims of these cuts becomes a range of its own.
void RankClasses::add_tensor_dim(int64_t n, std::span<const Cut> before, std::span<const Cut> after) {
  if (const std::optional<Matching> matching = Matching::of_cuts(mesh_, n, before, after)) {
    return split_all(matching->tied_dims());
  }
  const auto common = static_cast<size_t>(
      std::mismatch(before.begin(), before.end(), after.begin(), after.end()).first - before.begin());
  std::vector<IntervalList> shapes(1);
  append(shapes[0], {0, n});
  split_by_shape(shapes, before.first(common));
  if (common < before.size() && common < after.size()) {
    return split_all(dims_of(before.subspan(common)) | dims_of(after.subspan(common)));
  }
  split_by_shape(shapes, (common < before.size() ? before : after).subspan(common));
}

// Follows the distinct shapes of parts from cut to cut. Once there are too many shapes or pieces, every coordinate on
// the mesh dims of the remaining cuts becomes a range of its own.
void RankClasses::split_by_shape(std::vector<IntervalList>& shapes, std::span<const Cut> cuts) {
  for (size_t i = 0; i < cuts.size(); ++i) {
    const CutRule& rule = cuts[i].rule;
    const int64_t k = mesh_.dim_size(cuts[i].mesh_dim);
    if (!rule.descends()) {
      for (const int64_t c : {rule.coordinate_of_largest(0, k), rule.coordinate_of_smallest(0, k)}) {
        split_at(cuts[i].mesh_dim, c);
        split_at(cuts[i].mesh_dim, c + 1);
      }
    }
    std::vector<IntervalList> parts;
    const auto keep = [&](IntervalList part) {
      if (std::find(parts.begin(), parts.end(), part) == parts.end()) parts.push_back(std::move(part));
    };
    for (const IntervalList& shape : shapes) {
      const int64_t n = length(shape);
      const bool is_quick = shape.size() <= 1 && rule.makes_runs();
      if (!is_quick && k * rule.runs(n, k) * static_cast<int64_t>(shape.size()) > kMaxPiecesCompared) {
        return split_all(dims_of(cuts.subspan(i)));
      }
      if (shape.size() <= 1) {
        for (const int64_t c : rule.starts_of_like_parts(n, k)) {
          split_at(cuts[i].mesh_dim, c);
          keep(moved_to_zero(rule.part(shape, k, c)));
        }
        continue;
      }
      IntervalList last;
      for (int64_t c = 0; c < k; ++c) {
        IntervalList part = moved_to_zero(rule.part(shape, k, c));
        if (c > 0 && part != last) split_at(cuts[i].mesh_dim, c);
        last = part;
        keep(std::move(part));
      }
    }
    if (parts.size() > kMaxShapes) return split_all(dims_of(cuts.subspan(i)));
    shapes = std::move(parts);
  }
}

RankSample RankClasses::product(const std::vector<std::vector<int64_t>>& coordinates) const {
  RankSample sample{{0}, {1}};
  for (int d = 0; d < mesh_.ndim(); ++d) {
    RankSample more;
    for (size_t i = 0; i < sample.positions.size(); ++i) {
      for (size_t c = 0; c < coordinates[d].size(); ++c) {
        const int64_t next = c + 1 < coordinates[d].size() ? coordinates[d][c + 1] : mesh_.dim_size(d);
        more.positions.push_back(sample.positions[i] + coordinates[d][c] * mesh_.stride(d));
        more.weights.push_back(sample.weights[i] * (next - coordinates[d][c]));
      }
    }
    sample = std::move(more);
  }
  return sample;
}

RankSample RankClasses::sample(int64_t max_ranks) const {
  std::vector<std::vector<int64_t>> coordinates(mesh_.ndim());
  __int128 count = 1;
  for (int d = 0; d < mesh_.ndim(); ++d) {
    if (split_dims_.contains(d)) {
      for (int64_t c = 0; c < mesh_.dim_size(d); ++c) coordinates[d].push_back(c);
    } else {
      coordinates[d].assign(starts_[d].begin(), std::prev(starts_[d].end()));
    }
    count *= static_cast<int64_t>(coordinates[d].size());
  }
  if (count <= max_ranks) return product(coordinates);
  // Take the outermost and the boundary coordinates, plus a few inner ones if every coordinate is its own range. If
  // these are still too many ranks, take fewer, beginning with the last mesh dims.
  count = 1;
  for (int d = 0; d < mesh_.ndim(); ++d) {
    const int64_t size = mesh_.dim_size(d);
    std::set<int64_t> kept(starts_[d].begin(), std::prev(starts_[d].end()));
    if (split_dims_.contains(d)) kept.insert({1 % size, size / 2, std::max<int64_t>(size - 2, 0)});
    kept.insert(size - 1);
    coordinates[d].assign(kept.begin(), kept.end());
    count *= static_cast<int64_t>(kept.size());
  }
  for (int d = mesh_.ndim(); d-- > 0 && count > max_ranks;) {
    count /= static_cast<int64_t>(coordinates[d].size());
    coordinates[d] = {0};
    if (mesh_.dim_size(d) > 1 && 2 * count <= max_ranks) coordinates[d].push_back(mesh_.dim_size(d) - 1);
    count *= static_cast<int64_t>(coordinates[d].size());
  }
  RankSample sample = product(coordinates);
  sample.is_complete = false;
  return sample;
}

}  // namespace shardwright
