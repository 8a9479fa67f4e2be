#include "crossing/relays.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

namespace shardwright {
namespace {

int64_t ceil_divide(int64_t n, int64_t k) { return (n + k - 1) / k; }

// Returns whether in every tensor dim these mesh dims cut last.
bool cut_last(const Layout& layout, MeshDimSet mesh_dims) {
  for (const std::vector<Cut>& cuts : layout.cuts()) {
    bool is_last = false;
    for (const Cut& cut : cuts) {
      if (is_last && !mesh_dims.contains(cut.mesh_dim)) return false;
      is_last = is_last || mesh_dims.contains(cut.mesh_dim);
    }
  }
  return true;
}

// The layout without some mesh dims, on the ranks with the first coordinates there.
Layout without(const Layout& layout, MeshDimSet mesh_dims) {
  const Mesh& mesh = layout.mesh();
  std::vector<std::string> names;
  std::vector<int64_t> sizes;
  std::vector<Placement> placements;
  std::vector<int> number(mesh.ndim());
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (mesh_dims.contains(d)) continue;
    number[d] = static_cast<int>(names.size());
    names.push_back(mesh.dim_names()[d]);
    sizes.push_back(mesh.dim_size(d));
    placements.push_back(layout.placements()[d]);
  }
  std::vector<int64_t> ranks;
  for (int64_t p = 0; p < mesh.size(); ++p) {
    bool is_first = true;
    for (const int d : mesh_dims.to_vector()) is_first = is_first && mesh.coordinate(p, d) == 0;
    if (is_first) ranks.push_back(shardwright::number(mesh.rank_at(Position{p})));
  }
  ShardOrder order;
  for (int t = 0; t < layout.ndim(); ++t) {
    for (const Cut& cut : layout.cuts(t)) {
      if (!mesh_dims.contains(cut.mesh_dim)) order[t].push_back(number[cut.mesh_dim]);
    }
  }
  return Layout(std::make_shared<Mesh>(std::move(names), std::move(sizes), ranks, mesh.topology()),
                layout.tensor_shape(), layout.dtype(), std::move(placements), order, StridedMeaning::kLiteral,
                layout.flattened());
}

// Returns the union of lists that ascend and share nothing.
IntervalList together(const std::vector<Interval>& all) {
  IntervalList list;
  for (const Interval& one : sorted_by_place(all)) append(list, one);
  return list;
}

CutRule rule_of(const std::vector<std::vector<Interval>>& lists) {
  std::vector<int64_t> sizes;
  int64_t end = 0;
  for (const std::vector<Interval>& list : lists) {
    if (list.size() > 1 || (!list.empty() && list[0].begin != end)) return CutRule::pieces(lists);
    if (!list.empty()) end = list[0].end;
    sizes.push_back(list.empty() ? 0 : list[0].end - list[0].begin);
  }
  return CutRule::ragged(sizes);
}

// Blocks of consecutive positions.
std::optional<Layout> in_blocks(const Layout& layout, int64_t wanted) {
  const Mesh& mesh = layout.mesh();
  if (!layout.replicated_dims().empty()) return std::nullopt;
  int tensor_dim = -1;
  for (int t = 0; t < layout.ndim(); ++t) {
    if (layout.cuts(t).empty()) continue;
    if (tensor_dim >= 0) return std::nullopt;
    tensor_dim = t;
  }
  if (tensor_dim < 0) return std::nullopt;
  std::vector<std::pair<int64_t, IntervalList>> parts;  // by position, without empty ones
  size_t runs = 0;
  for (int64_t p = 0; p < mesh.size() && runs <= kMostRuns; ++p) {
    IntervalList part = part_at(mesh, layout.shape()[tensor_dim], layout.cuts(tensor_dim), p);
    runs += part.size();
    if (!part.empty()) parts.emplace_back(p, std::move(part));
  }
  const auto count = static_cast<int64_t>(parts.size());
  const int64_t block = ceil_divide(count, std::max<int64_t>(wanted, 1));
  if (block < 2 || runs > kMostRuns) return std::nullopt;
  std::vector<int64_t> ranks;
  std::vector<std::vector<Interval>> lists;
  for (int64_t first = 0; first < count; first += block) {
    std::vector<Interval> all;
    for (int64_t i = first; i < std::min(first + block, count); ++i) {
      all.insert(all.end(), parts[i].second.begin(), parts[i].second.end());
    }
    const IntervalList list = together(all);
    lists.emplace_back(list.begin(), list.end());
    ranks.push_back(number(mesh.rank_at(Position{parts[first].first})));
  }
  const auto size = static_cast<int64_t>(ranks.size());
  if (size < 2) return std::nullopt;
  const auto relays =
      std::make_shared<Mesh>(std::vector<std::string>{"relay"}, std::vector<int64_t>{size}, ranks, mesh.topology());
  return Layout(relays, layout.tensor_shape(), layout.dtype(), {Placement::cut(tensor_dim, rule_of(lists))}, {},
                StridedMeaning::kLiteral, layout.flattened());
}

}  // namespace

std::vector<Layout> relays_of(const Layout& layout, int64_t wanted) {
  const Mesh& mesh = layout.mesh();
  std::vector<Layout> found;
  if (std::optional<Layout> blocks = in_blocks(layout, wanted)) found.push_back(std::move(*blocks));
  std::vector<MeshDimSet> kinds;
  MeshDimSet last;
  for (int d = mesh.ndim() - 1; d >= 0; --d) {
    if (mesh.dim_size(d) == 1) continue;
    last.insert(d);
    for (const MeshDimSet& dims : {MeshDimSet::single(d), last}) {
      const int64_t relays = mesh.size() / mesh.group_size(dims);
      const bool is_known = std::find(kinds.begin(), kinds.end(), dims) != kinds.end();
      if (relays > 1 && !is_known && cut_last(layout, dims)) kinds.push_back(dims);
    }
  }
  const auto distance = [&](MeshDimSet dims) {
    const int64_t relays = mesh.size() / mesh.group_size(dims);
    return std::max(relays, wanted) / std::min(relays, std::max<int64_t>(wanted, 1));
  };
  std::stable_sort(kinds.begin(), kinds.end(), [&](MeshDimSet a, MeshDimSet b) { return distance(a) < distance(b); });
  for (const MeshDimSet& dims : kinds) {
    if (found.size() < kMostRelayLayouts) found.push_back(without(layout, dims));
  }
  return found;
}

}  // namespace shardwright
