#include "search/split.h"

#include <algorithm>
#include <string>
#include <utility>

#include "support/error.h"

namespace shardwright {
namespace {

// Minimum size of a mesh dim that is split evenly. A smaller mesh dim is only split between nodes, because gathers over
// it have few messages.
constexpr int64_t kMinSize = 9;
// Maximum number of ranks of a mesh whose ranks are assigned to nodes one by one.
constexpr int64_t kMaxRanksSearched = 65536;

// Returns the layout on another mesh of the same ranks. Mesh dim d becomes mesh dim new_dims[d], or is left out if
// that is negative. All other mesh dims of the new mesh are replicated.
Layout renumbered(const Layout& layout, const MeshPtr& mesh, const std::vector<int>& new_dims) {
  std::vector<Placement> placements(mesh->ndim(), Placement::replicate());
  ShardOrder order;
  for (int t = 0; t < layout.ndim(); ++t) {
    for (const Cut& cut : layout.cuts(t)) order[t].push_back(new_dims[cut.mesh_dim]);
  }
  for (int d = 0; d < layout.mesh().ndim(); ++d) {
    if (new_dims[d] >= 0) placements[new_dims[d]] = layout.placements()[d];
  }
  return Layout(mesh, layout.tensor_shape(), layout.dtype(), std::move(placements), order, StridedMeaning::kLiteral,
                layout.flattened());
}

// Returns the largest `count` such that each block of `count` consecutive coordinates, from a multiple of `count` on,
// is on one node. Returns all coordinates if nodes are unknown, and 1 on a mesh of more than kMaxRanksSearched ranks.
int64_t coordinates_on_a_node(const Mesh& mesh, int mesh_dim, int64_t ranks_per_node) {
  const int64_t k = mesh.dim_size(mesh_dim);
  if (ranks_per_node <= 0) return k;
  if (mesh.size() > kMaxRanksSearched) return 1;
  const auto node_at = [&](int64_t position) { return to_int(mesh.rank_at(Position{position})) / ranks_per_node; };
  for (int64_t count = std::min(k, ranks_per_node); count > 1; --count) {
    if (k % count != 0) continue;
    bool shares_nodes = true;
    for (int64_t p = 0; p < mesh.size() && shares_nodes; ++p) {
      const int64_t back = mesh.coordinate(p, mesh_dim) % count;
      shares_nodes = node_at(p) == node_at(p - back * mesh.stride(mesh_dim));
    }
    if (shares_nodes) return count;
  }
  return 1;
}

// Returns `count` factors of n, the largest first, that are about equal, or fewer if n has no more. For example, 2048
// has the 2 factors 64 and 32, and the 3 factors 16, 16 and 8.
std::vector<int64_t> even_factors(int64_t n, int count) {
  if (count == 1) return {n};
  int64_t first = n;
  // The least divisor whose `count`-th power is at least n, so that the other factors are not larger.
  for (int64_t d = 2; d < first; ++d) {
    int64_t power = 1;
    for (int i = 0; i < count && power < n; ++i) power *= d;
    if (n % d == 0 && power >= n) first = d;
  }
  if (first == n) return {n};
  std::vector<int64_t> factors{first};
  for (const int64_t factor : even_factors(n / first, count - 1)) factors.push_back(factor);
  return factors;
}

}  // namespace

std::optional<Layout> split(const Layout& layout, int mesh_dim, const std::vector<int64_t>& sizes) {
  check_invariant(!layout.cut_dims().contains(mesh_dim) && !layout.partial_dims().contains(mesh_dim), "mesh dim ",
                  mesh_dim, " of ", layout, " is to be split, but it is cut or partial");
  const Mesh& unsplit = layout.mesh();
  std::vector<std::string> names;
  std::vector<int64_t> dim_sizes;
  std::vector<int> new_dims;
  for (int d = 0; d < unsplit.ndim(); ++d) {
    new_dims.push_back(d == mesh_dim ? -1 : static_cast<int>(names.size()));
    if (d != mesh_dim) {
      names.push_back(unsplit.dim_names()[d]);
      dim_sizes.push_back(unsplit.dim_size(d));
      continue;
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      names.push_back(concat(unsplit.dim_names()[d], ".", i));
      if (std::count(unsplit.dim_names().begin(), unsplit.dim_names().end(), names.back()) > 0) return std::nullopt;
      dim_sizes.push_back(sizes[i]);
    }
  }
  const std::vector<int64_t> ranks = unsplit.ranks_are_positions() ? std::vector<int64_t>{} : to_ints(unsplit.ranks());
  const auto mesh = std::make_shared<Mesh>(std::move(names), std::move(dim_sizes), ranks, unsplit.topology());
  return renumbered(layout, mesh, new_dims);
}

std::optional<Layout> joined(const Layout& layout, const MeshPtr& mesh) {
  const Mesh& fine = layout.mesh();
  std::vector<int> new_dims(fine.ndim(), -1);
  int next = 0;
  for (int d = 0; d < mesh->ndim(); ++d) {
    const int first = next;
    int64_t size = 1;
    do {
      if (next == fine.ndim()) return std::nullopt;
      size *= fine.dim_size(next++);
    } while (size < mesh->dim_size(d));
    if (size != mesh->dim_size(d)) return std::nullopt;
    if (next == first + 1) {
      new_dims[first] = d;
      continue;
    }
    for (int part = first; part < next; ++part) {
      if (layout.placements()[part].is_shard_like() || layout.placements()[part].is_partial()) return std::nullopt;
    }
  }
  const bool has_same_ranks = next == fine.ndim() && fine.ranks() == mesh->ranks();
  return has_same_ranks ? std::optional<Layout>(renumbered(layout, mesh, new_dims)) : std::nullopt;
}

std::vector<std::vector<int64_t>> ways_to_split(const Mesh& mesh, int mesh_dim, int64_t ranks_per_node) {
  const int64_t k = mesh.dim_size(mesh_dim);
  const int64_t inside = coordinates_on_a_node(mesh, mesh_dim, ranks_per_node);
  std::vector<std::vector<int64_t>> ways;
  const auto add = [&](std::vector<int64_t> sizes) {
    const bool is_new = std::find(ways.begin(), ways.end(), sizes) == ways.end();
    if (sizes.size() > 1 && is_new) ways.push_back(std::move(sizes));
  };
  if (inside > 1 && inside < k) {
    add({k / inside, inside});
    if (k / inside >= kMinSize) {
      std::vector<int64_t> sizes = even_factors(k / inside, 2);
      sizes.push_back(inside);
      add(std::move(sizes));
    }
  }
  if (k >= kMinSize) {
    add(even_factors(k, 2));
    if (k >= kMinSize * kMinSize) add(even_factors(k, 3));
  }
  return ways;
}

}  // namespace shardwright
