// The axes of an index map, and the elements of each of their shards.
//
// An axis *of the map* is a MapAxis (exchange/index_map.h). An axis *of the grids* (exchange/axes.h) is a *group* of
// axes of the map. A *local dim* is a dim of Layout::shape(): one tensor dim, or the flattened tensor dims together.
//
// Example: columns 4 and 5 of a flattened source (4, 6) move to columns 2 and 3 of (4, 4). The source flattens both
// axes of the map, so they are one group of 4 x 2 = 8 indices: row * 2 + (column - 4). A rank that holds rows 0 and 1
// of the source has 12 elements in its local tensor. Lister lists them by their indices in the group, in local order:
//
//   row 0    columns 0 to 3: [8, 12)     columns 4 and 5: [0, 2)
//   row 1    columns 0 to 3: [14, 18)    columns 4 and 5: [2, 4)
//
// The elements in columns 0 to 3 do not move. They have indices from 8 on, which no element of the destination has.
#include <algorithm>
#include <iterator>
#include <map>
#include <span>
#include <utility>

#include "exchange/axes.h"
#include "support/error.h"

namespace shardwright {
namespace {

// The indices of the map's axes that form one axis of the grids, in order. Indices of the grids' axis number their
// combinations, row-major.
using Group = std::vector<int>;

// A tensor dim of a group: the range of its indices that the map moves, and the stride of the range in the group.
struct Dim {
  int64_t size = 1;    // of the tensor dim
  int64_t begin = 0;   // first index of the range
  int64_t length = 1;  // of the range
  int64_t stride = 1;  // in indices of the group

  bool is_whole() const { return begin == 0 && length == size; }
};

// A dim of local tensors: one tensor dim, or several flattened ones.
struct LocalDim {
  int index = 0;          // in Layout::shape()
  std::vector<Dim> dims;  // the tensor dims of the group, merged where possible, outermost first
};

// The elements of a shard of an axis, by their indices in the group.
struct ShardElements {
  IntervalList moved;  // elements that the map moves, in local order
  IntervalList local;  // all elements, in local order, so a position in the list is a position in the local tensor
};

// The source or the destination of a map.
struct Side {
  const Layout& layout;
  std::vector<Window> windows;  // by axis of the map: a window of a tensor dim
  bool is_source = true;
};

// Returns the groups of a map. The axes that the source flattens are one group, and the axes that the destination
// flattens are one. If some axis is in both, all of them are one group. Every other axis is a group of its own.
std::vector<Group> groups_of(const IndexMap& map, const Layout& src, const Layout& dst) {
  const auto is_flattened = [](int dim, const Layout& layout) {
    return layout.flattened() > 1 && dim >= 0 && dim < layout.flattened();
  };
  Group of_src;
  Group of_dst;
  std::vector<Group> groups;
  const std::vector<MapAxis>& axes = map.axes();
  bool have_common_axis = false;
  for (int a = 0; a < static_cast<int>(axes.size()); ++a) {
    const bool in_src = is_flattened(axes[a].src_dim, src);
    const bool in_dst = is_flattened(axes[a].dst_dim, dst);
    have_common_axis = have_common_axis || (in_src && in_dst);
    if (in_src) of_src.push_back(a);
    if (in_dst) of_dst.push_back(a);
    if (!in_src && !in_dst) groups.push_back({a});
  }
  if (have_common_axis) {
    for (const int a : of_dst) {
      if (std::find(of_src.begin(), of_src.end(), a) == of_src.end()) of_src.push_back(a);
    }
    of_dst.clear();
  }
  const auto sorted = [&](Group group, int MapAxis::* dim) {
    std::stable_sort(group.begin(), group.end(), [&](int a, int b) { return axes[a].*dim < axes[b].*dim; });
    return group;
  };
  if (!of_src.empty()) groups.push_back(sorted(of_src, &MapAxis::src_dim));
  if (!of_dst.empty()) groups.push_back(sorted(of_dst, &MapAxis::dst_dim));
  return groups;
}

// Returns the number of indices of a group.
int64_t num_indices(const Group& group, const Side& side) {
  int64_t elements = 1;
  for (const int a : group) elements *= side.windows[a].length;
  return elements;
}

// Returns the local dims that a group covers, in their order. Neighboring tensor dims of a flattened dim are merged if
// their elements are contiguous in the group.
std::vector<LocalDim> local_dims_of(const Group& group, const Side& side) {
  const std::vector<int64_t> shape = side.layout.tensor_shape();
  std::map<int, Dim> dims;  // by tensor dim
  int64_t stride = 1;
  for (size_t i = group.size(); i-- > 0;) {
    const Window& window = side.windows[group[i]];
    if (window.tensor_dim != Window::kNoDim) {
      dims[window.tensor_dim] = {shape[window.tensor_dim], window.begin, window.length, stride};
    }
    stride *= window.length;
  }
  const int flattened = side.layout.flattened();
  std::vector<LocalDim> local_dims;
  for (const auto& [tensor_dim, dim] : dims) {
    const int local_dim = std::max(tensor_dim - flattened + 1, 0);
    if (local_dims.empty() || local_dims.back().index != local_dim) local_dims.push_back({local_dim, {}});
    std::vector<Dim>& inside = local_dims.back().dims;
    if (!inside.empty() && dim.is_whole() && inside.back().stride == dim.size * dim.stride) {
      Dim& outer = inside.back();
      outer = {outer.size * dim.size, outer.begin * dim.size, outer.length * dim.size, dim.stride};
    } else {
      inside.push_back(dim);
    }
  }
  return local_dims;
}

// Lists the elements of a shard in local order: a loop over its local dims, outermost first. A run of the last dim is
// one interval, and a block that repeats at equal distances is stored once.
class Lister {
 public:
  // `lists` has the shard's indices of each local dim. `num_indices` is the number of indices of the group.
  Lister(const std::vector<LocalDim>& dims, std::vector<IntervalList> lists, int64_t num_indices, bool is_source)
      : dims_(dims), lists_(std::move(lists)), num_indices_(num_indices), is_source_(is_source) {}

  // Lists all elements. Call once.
  ShardElements list() {
    if (dims_.empty()) return {{{0, 1}}, {{0, 1}}};
    list_dims(0, 0, true);
    return std::move(listed_);
  }

 private:
  // A run of indices of a local dim.
  struct Run {
    int64_t index = 0;   // contribution of the first index to the index in the group
    int64_t length = 0;  // number of indices
    int64_t stride = 0;  // between contributions of consecutive indices
    bool is_moved = true;
  };

  // Lists all elements with one combination of indices of the local dims before `d`. `index` is the contribution of
  // that combination to the index in the group. `is_moved` is false if the map does not move it.
  void list_dims(size_t d, int64_t index, bool is_moved) {
    const std::vector<Dim>& dims = dims_[d].dims;
    for (const auto& [items, count, shift] : lists_[d].blocks()) {
      const int64_t end = items.back().end + (count - 1) * shift;
      const bool is_within =
          dims.size() == 1 && items.front().begin >= dims[0].begin && end <= dims[0].begin + dims[0].length;
      if (is_within) {
        repeat(count, shift * dims[0].stride, [&](int64_t by) { list_intervals(d, items, 0, index + by, is_moved); });
      } else {
        for (int64_t i = 0; i < count; ++i) list_intervals(d, items, i * shift, index, is_moved);
      }
    }
  }

  // Lists the elements with these intervals of local dim `d`, shifted by `shift`. `index` and `is_moved` are those of
  // list_dims().
  void list_intervals(size_t d, std::span<const Interval> items, int64_t shift, int64_t index, bool is_moved) {
    for (const Interval& item : items) {
      for (const Run& run : runs_of(dims_[d].dims, item.shifted(shift))) {
        const bool all_moved = is_moved && run.is_moved;
        if (d + 1 == dims_.size()) {
          add({index + run.index, run.length, run.stride, all_moved});
        } else {
          repeat(run.length, run.stride, [&](int64_t by) { list_dims(d + 1, index + run.index + by, all_moved); });
        }
      }
    }
  }

  // Calls list_once(by) for `by` = 0, shift, ..., (count - 1) * shift. Calls it only once if the other calls would
  // append the same list, shifted.
  template <typename ListOnce>
  void repeat(int64_t count, int64_t shift, const ListOnce& list_once) {
    if (count < IntervalList::kLeastRepeats) {
      for (int64_t i = 0; i < count; ++i) list_once(i * shift);
      return;
    }
    ShardElements before = std::exchange(listed_, {});
    const int64_t position = position_;
    list_once(0);
    const ShardElements once = std::exchange(listed_, std::move(before));
    const IntervalList& list = once.local;
    const bool is_short = static_cast<int64_t>(list.size()) <= kMostInRepetition;
    if (is_short && once.moved == list && is_ascending(list) && span_of(list).extent() <= shift) {
      const std::vector<Interval> items(list.begin(), list.end());
      listed_.local.append_repeated(items, shift, count);
      listed_.moved.append_repeated(items, shift, count);
      position_ = position + count * (position_ - position);
      check_runs();
      return;
    }
    for (const auto& block : list.blocks()) listed_.local.append(block);
    for (const auto& block : once.moved.blocks()) listed_.moved.append(block);
    for (int64_t i = 1; i < count; ++i) list_once(i * shift);
  }

  // Divides an interval of a local dim with these tensor dims into runs: at the ends of rows of the last tensor dim,
  // and at the beginning and end of the range that the map moves. Example: rows of 6 columns, of which 4 and 5 move,
  // divide [0, 12) into runs of 4, 2, 4 and 2.
  static std::vector<Run> runs_of(const std::vector<Dim>& dims, const Interval& interval) {
    std::vector<Run> runs;
    const Dim& last = dims.back();
    for (int64_t at = interval.begin; at < interval.end;) {
      const int64_t row_begin = dims.size() == 1 ? 0 : at / last.size * last.size;
      const int64_t row_end = dims.size() == 1 ? interval.end : std::min(interval.end, row_begin + last.size);
      Run row{0, 0, last.stride, true};
      int64_t outer_index = last.size == 0 ? 0 : at / last.size;
      for (size_t d = dims.size() - 1; d-- > 0; outer_index /= std::max<int64_t>(dims[d].size, 1)) {
        const int64_t i = outer_index % dims[d].size - dims[d].begin;
        row.is_moved = row.is_moved && i >= 0 && i < dims[d].length;
        row.index += i * dims[d].stride;
      }
      const int64_t from = at - row_begin;
      const int64_t to = row_end - row_begin;
      const int64_t begin = std::clamp(last.begin, from, to);
      const int64_t end = std::clamp(last.begin + last.length, begin, to);
      if (from < begin) runs.push_back({0, begin - from, 0, false});
      if (begin < end)
        runs.push_back({row.index + (begin - last.begin) * last.stride, end - begin, last.stride, row.is_moved});
      if (end < to) runs.push_back({0, to - end, 0, false});
      at = row_end;
    }
    return runs;
  }

  // Appends a run of the last local dim. Elements that do not move have indices outside [0, num_indices_): above it on
  // the source side, and below 0 on the destination side.
  void add(const Run& run) {
    if (!run.is_moved) {
      const Interval unmoved = is_source_ ? Interval{num_indices_ + position_, num_indices_ + position_ + run.length}
                                          : Interval{-position_ - run.length, -position_};
      append(listed_.local, unmoved);
    } else if (run.stride == 1 || run.length == 1) {
      append(listed_.local, {run.index, run.index + run.length});
      append(listed_.moved, {run.index, run.index + run.length});
    } else {
      append_repeated(listed_.local, {run.index, run.index + 1}, run.stride, run.length);
      append_repeated(listed_.moved, {run.index, run.index + 1}, run.stride, run.length);
    }
    check_runs();
    position_ += run.length;
  }

  // Throws UserError if there are too many runs.
  void check_runs() const {
    check_user(
        std::ssize(listed_.local.stored()) <= CutRule::kMaxRuns,
        "placements: a part of the flattened dims must have at most 2^20 intervals (intervals that repeat at "
        "equal distances count once), got more. First redistribute this tensor to a layout without flattened dims");
  }

  // Maximum number of intervals of a repeated block. Longer blocks are listed one by one.
  static constexpr int64_t kMostInRepetition = 4096;

  const std::vector<LocalDim>& dims_;
  std::vector<IntervalList> lists_;
  int64_t num_indices_;
  bool is_source_;
  int64_t position_ = 0;  // number of elements listed so far
  ShardElements listed_;
};

// Merges the last local dim into the dim before it, repeatedly, while the shard holds all indices of the last dim and
// its consecutive rows are contiguous in the group. Several rows are then one interval. Example: [0, 2) of 4 rows and
// [0, 6) of 6 columns become [0, 12) of 24.
void merge_whole_rows(std::vector<LocalDim>& dims, std::vector<IntervalList>& lists) {
  while (dims.size() > 1) {
    const std::vector<Dim>& last = dims.back().dims;
    std::vector<Dim>& before = dims[dims.size() - 2].dims;
    if (last.size() > 1 || !last[0].is_whole() || lists.back() != IntervalList{{0, last[0].size}}) return;
    if (before.back().stride != last[0].size * last[0].stride) return;
    const int64_t row = last[0].size;
    Dim& merged = before.back();
    merged = {merged.size * row, merged.begin * row, merged.length * row, last[0].stride};
    lists.pop_back();
    IntervalList rows;
    for (const auto& [items, count, shift] : lists.back().blocks()) {
      std::vector<Interval> wider;
      for (const Interval& item : items) wider.push_back({item.begin * row, item.end * row});
      rows.append_repeated(wider, shift * row, count);
    }
    lists.back() = std::move(rows);
    dims.pop_back();
  }
}

// Returns the axis of a group on one side, with the elements of each of its shards.
AxisGrid::Axis axis_of(const Group& group, const Side& side) {
  const Layout& layout = side.layout;
  const Mesh& mesh = layout.mesh();
  const std::vector<LocalDim> dims = local_dims_of(group, side);
  AxisGrid::Axis axis;
  for (const LocalDim& dim : dims) {
    for (const Cut& cut : layout.cuts(dim.index)) axis.mesh_dims.push_back(cut.mesh_dim);
  }
  std::map<int64_t, int64_t> positions;  // by shard: the first position that has it
  for (int64_t p = 0; p < mesh.size(); ++p) positions.try_emplace(mesh.coordinate_index(p, axis.mesh_dims), p);
  for (const auto& [shard, position] : positions) {
    LocalAxis local;
    std::vector<IntervalList> lists;
    for (const LocalDim& dim : dims) {
      lists.push_back(part_at(mesh, layout.shape()[dim.index], layout.cuts(dim.index), position));
      local.dims.push_back(dim.index);
      local.sizes.push_back(length(lists.back()));
    }
    std::vector<LocalDim> merged = dims;
    merge_whole_rows(merged, lists);
    ShardElements elements = Lister(merged, std::move(lists), num_indices(group, side), side.is_source).list();
    axis.lists.push_back(std::move(elements.moved));
    axis.local_lists.push_back(std::move(elements.local));
    axis.local_axes.push_back(std::move(local));
  }
  return axis;
}

// Returns the grid of one side.
AxisGrid grid_of(const Side& side, const std::vector<Group>& groups) {
  const Mesh& mesh = side.layout.mesh();
  AxisGrid grid{side.layout.mesh_ptr(), {}, std::vector<std::vector<int64_t>>(mesh.size())};
  for (const Group& group : groups) {
    grid.axes.push_back(axis_of(group, side));
    for (int64_t p = 0; p < mesh.size(); ++p) {
      grid.shards[p].push_back(mesh.coordinate_index(p, grid.axes.back().mesh_dims));
    }
  }
  return grid;
}

}  // namespace

AxisGrids axis_grids(const Layout& src, const Layout& dst, const IndexMap& map) {
  const std::vector<Group> groups = groups_of(map, src, dst);
  return {grid_of({src, map.src_windows(), true}, groups), grid_of({dst, map.dst_windows(), false}, groups)};
}

}  // namespace shardwright
