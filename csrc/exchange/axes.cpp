#include "exchange/axes.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "layout/product.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Returns the list of an axis of several tensor dims, from the list and the size of each dim.
IntervalList flattened(const std::vector<IntervalList>& lists, const std::vector<int64_t>& sizes) {
  IntervalList all{{0, 1}};
  for (size_t t = 0; t < lists.size(); ++t) {
    std::optional<IntervalList> finer = product_of(all, lists[t], sizes[t], CutRule::kMaxRuns);
    check_user(finer.has_value(),
               "placements: number of runs in a part of the flattened dims must be at most 2^20 (a repeating "
               "block counts once), got more. Shard fewer of these dims, or in larger blocks");
    all = std::move(*finer);
  }
  return all;
}

// Returns the grid of a layout. The first axes are the mesh dims `kept`, whose reductions stay pending. The first
// `flattened_dims` tensor dims form one axis, every other tensor dim an axis of its own.
AxisGrid grid_of(const Layout& layout, MeshDimSet kept, int flattened_dims) {
  AxisGrid grid{layout.mesh_ptr(), {}, {}};
  for (const int d : kept.to_vector()) {
    AxisGrid::Axis axis{{d}, {}, {}, {}};
    for (int64_t c = 0; c < layout.mesh().dim_size(d); ++c) axis.lists.push_back({{c, c + 1}});
    grid.axes.push_back(std::move(axis));
  }
  // The number of tensor dims of the layout in the first axis.
  const int together = flattened_dims - layout.flattened() + 1;
  for (int t = 0; t < layout.ndim(); t += t == 0 ? together : 1) {
    const int end = t == 0 ? together : t + 1;
    AxisGrid::Axis axis;
    for (int u = t; u < end; ++u) {
      for (const Cut& cut : layout.cuts(u)) axis.mesh_dims.push_back(cut.mesh_dim);
    }
    const Mesh& mesh = layout.mesh();
    std::map<int64_t, IntervalList> lists;
    for (int64_t p = 0; p < mesh.size(); ++p) {
      const auto [found, is_new] = lists.try_emplace(mesh.coordinate_index(p, axis.mesh_dims));
      if (!is_new) continue;
      std::vector<IntervalList> parts;
      for (int u = t; u < end; ++u) parts.push_back(part_at(mesh, layout.shape()[u], layout.cuts(u), p));
      const std::vector<int64_t> sizes(layout.shape().begin() + t, layout.shape().begin() + end);
      found->second = parts.size() == 1 ? std::move(parts[0]) : flattened(parts, sizes);
    }
    for (auto& [shard, list] : lists) axis.lists.push_back(std::move(list));
    grid.axes.push_back(std::move(axis));
  }
  for (int64_t p = 0; p < layout.mesh().size(); ++p) {
    std::vector<int64_t> shards;
    for (const AxisGrid::Axis& axis : grid.axes) shards.push_back(layout.mesh().coordinate_index(p, axis.mesh_dims));
    grid.shards.push_back(std::move(shards));
  }
  return grid;
}

}  // namespace

MeshDimSet kept_partials(const Layout& src, const Layout& dst) {
  return src.mesh() == dst.mesh() ? src.partial_dims() & dst.partial_dims() : MeshDimSet();
}

AxisGrids axis_grids(const Layout& src, const Layout& dst) {
  check_invariant(src.tensor_shape() == dst.tensor_shape() && src.dtype() == dst.dtype(),
                  "the layouts of one grid differ in shape or dtype: ", src, " and ", dst);
  const MeshDimSet kept = kept_partials(src, dst);
  const int flattened_dims = std::max(src.flattened(), dst.flattened());
  return {grid_of(src, kept, flattened_dims), grid_of(dst, kept, flattened_dims)};
}

Region AxisGrid::region(int64_t position, std::vector<IntervalList> Axis::* lists) const {
  Region region;
  for (size_t i = 0; i < axes.size(); ++i) region.push_back((axes[i].*lists)[shards[position][i]]);
  return region;
}

Region AxisGrid::local_region(int64_t position) const {
  const bool is_mapped = !axes.empty() && !axes.front().placed.empty();
  return region(position, is_mapped ? &Axis::placed : &Axis::lists);
}

std::vector<LocalAxis> AxisGrid::local_axes(int64_t position) const {
  std::vector<LocalAxis> local;
  for (size_t i = 0; i < axes.size(); ++i) local.push_back(axes[i].local[shards[position][i]]);
  return local;
}

}  // namespace shardwright
