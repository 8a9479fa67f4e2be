#include "exchange/axes.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "layout/product.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Returns the list of an axis of several tensor dims, from the list and the size of each dim: the row-major indices of
// all combinations. Example: [1, 3) of 4 and [0, 2) of 3 give [3, 5) [6, 8).
IntervalList flattened(const std::vector<IntervalList>& lists, const std::vector<int64_t>& sizes) {
  IntervalList all{{0, 1}};
  for (size_t t = 0; t < lists.size(); ++t) {
    std::optional<IntervalList> product = product_of(all, lists[t], sizes[t], CutRule::kMaxRuns);
    check_user(product.has_value(),
               "placements: a part of the flattened dims must have at most 2^20 intervals (intervals that repeat at "
               "equal distances count once), got more. Shard fewer of these dims, or in larger blocks");
    all = std::move(*product);
  }
  return all;
}

// Returns the axis of a mesh dim whose reduction stays pending: one index for each coordinate.
AxisGrid::Axis axis_of_partial(const Mesh& mesh, int mesh_dim) {
  AxisGrid::Axis axis{{mesh_dim}, {}, {}, {}};
  for (int64_t c = 0; c < mesh.dim_size(mesh_dim); ++c) axis.lists.push_back({{c, c + 1}});
  return axis;
}

// Returns the axis that the dims [begin, end) of layout.shape() form together.
AxisGrid::Axis axis_of_dims(const Layout& layout, int begin, int end) {
  const Mesh& mesh = layout.mesh();
  AxisGrid::Axis axis;
  for (int t = begin; t < end; ++t) {
    for (const Cut& cut : layout.cuts(t)) axis.mesh_dims.push_back(cut.mesh_dim);
  }
  std::map<int64_t, IntervalList> lists;  // by axis shard
  for (int64_t p = 0; p < mesh.size(); ++p) {
    const auto [found, is_new] = lists.try_emplace(mesh.coordinate_index(p, axis.mesh_dims));
    if (!is_new) continue;
    std::vector<IntervalList> parts;
    for (int t = begin; t < end; ++t) parts.push_back(part_at(mesh, layout.shape()[t], layout.cuts(t), p));
    const std::vector<int64_t> sizes(layout.shape().begin() + begin, layout.shape().begin() + end);
    found->second = parts.size() == 1 ? std::move(parts[0]) : flattened(parts, sizes);
  }
  for (auto& [shard, list] : lists) axis.lists.push_back(std::move(list));
  return axis;
}

// Returns the grid of a layout. The first axes are the mesh dims `kept`, whose reductions stay pending. The first
// `flattened_dims` tensor dims form one axis, and every other tensor dim an axis of its own.
AxisGrid grid_of(const Layout& layout, MeshDimSet kept, int flattened_dims) {
  const Mesh& mesh = layout.mesh();
  AxisGrid grid{layout.mesh_ptr(), {}, {}};
  for (const int d : kept.to_vector()) grid.axes.push_back(axis_of_partial(mesh, d));
  // Dim 0 of layout.shape() is layout.flattened() of these tensor dims.
  const int dims_of_first = flattened_dims - layout.flattened() + 1;
  for (int begin = 0; begin < layout.ndim();) {
    const int end = begin == 0 ? dims_of_first : begin + 1;
    grid.axes.push_back(axis_of_dims(layout, begin, end));
    begin = end;
  }
  for (int64_t p = 0; p < mesh.size(); ++p) {
    std::vector<int64_t> shards;
    for (const AxisGrid::Axis& axis : grid.axes) shards.push_back(mesh.coordinate_index(p, axis.mesh_dims));
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
  const bool is_mapped = !axes.empty() && !axes.front().local_lists.empty();
  return region(position, is_mapped ? &Axis::local_lists : &Axis::lists);
}

std::vector<LocalAxis> AxisGrid::local_axes(int64_t position) const {
  std::vector<LocalAxis> local;
  for (size_t i = 0; i < axes.size(); ++i) local.push_back(axes[i].local_axes[shards[position][i]]);
  return local;
}

}  // namespace shardwright
