// The axes of an index map, and the elements of each of their shards.
//
// Words: an axis *of the map* is a MapAxis (exchange/index_map.h). An axis *of the grids* (exchange/axes.h) is a group
// of such axes. A *local dim* is a dim of Layout::shape(): one tensor dim, or the flattened ones together. An *item* is
// the move that the map describes.
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

// A tensor dim of a group: the range of its indices that the map moves, and the stride of its index in the group.
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

// The elements of a shard of an axis. `placed` has all elements, in local order, so an index in it is an index in the
// local tensor. Elements that the item does not move have indices in `placed` that no other list has.
struct Held {
  IntervalList moved;
  IntervalList placed;
};

// The source or the destination side of an item.
struct SideOfItem {
  const Layout& layout;
  std::vector<Window> windows;  // by axis of the map: a window of a tensor dim
  bool is_source = true;
};

// Returns the groups of a map. Axes that the source flattens are one group, and so are axes that the destination
// flattens. Both are one group together if some axis is in both.
std::vector<Group> groups_of(const IndexMap& map, const Layout& src, const Layout& dst) {
  const auto is_flattened = [](int dim, const Layout& layout) {
    return layout.flattened() > 1 && dim >= 0 && dim < layout.flattened();
  };
  Group of_src;
  Group of_dst;
  std::vector<Group> groups;
  const std::vector<MapAxis>& axes = map.axes();
  bool overlap = false;
  for (int a = 0; a < static_cast<int>(axes.size()); ++a) {
    const bool in_src = is_flattened(axes[a].src_dim, src);
    const bool in_dst = is_flattened(axes[a].dst_dim, dst);
    overlap = overlap || (in_src && in_dst);
    if (in_src) of_src.push_back(a);
    if (in_dst) of_dst.push_back(a);
    if (!in_src && !in_dst) groups.push_back({a});
  }
  if (overlap) {
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
int64_t num_elements(const Group& group, const SideOfItem& side) {
  int64_t elements = 1;
  for (const int a : group) elements *= side.windows[a].length;
  return elements;
}

// Returns the local dims that a group covers, in their order. Neighboring tensor dims of a flattened dim are merged if
// their elements are contiguous in the group.
std::vector<LocalDim> local_dims_of(const Group& group, const SideOfItem& side) {
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

// Lists the elements of a shard in local order. A run of the last dim is one interval, and a block that repeats at
// equal distances is kept once.
class Lister {
 public:
  // `num_indices` is the number of indices of the group.
  Lister(const std::vector<LocalDim>& dims, std::vector<IntervalList> lists, int64_t num_indices, bool is_source)
      : dims_(dims), lists_(std::move(lists)), num_indices_(num_indices), is_source_(is_source) {}

  // Lists all elements. Call once.
  Held held() {
    if (dims_.empty()) return {{{0, 1}}, {{0, 1}}};
    visit(0, 0, true);
    return std::move(held_);
  }

 private:
  // A run of indices of a local dim. `index` is this dim's contribution to the group index of the first one.
  struct Run {
    int64_t index = 0;
    int64_t length = 0;
    int64_t stride = 0;
    bool is_moved = true;
  };

  // Lists the elements of the local dims from `d` on. `index` is the contribution of the dims before `d` to the group
  // index. `is_moved` is false if the item does not move their indices.
  void visit(size_t d, int64_t index, bool is_moved) {
    const std::vector<Dim>& dims = dims_[d].dims;
    for (const auto& [items, count, shift] : lists_[d].blocks()) {
      const int64_t end = items.back().end + (count - 1) * shift;
      const bool is_within =
          dims.size() == 1 && items.front().begin >= dims[0].begin && end <= dims[0].begin + dims[0].length;
      if (is_within) {
        repeat(count, shift * dims[0].stride, [&](int64_t by) { visit_items(d, items, 0, index + by, is_moved); });
      } else {
        for (int64_t i = 0; i < count; ++i) visit_items(d, items, i * shift, index, is_moved);
      }
    }
  }

  // Lists the elements with these intervals, shifted by `shift`, of local dim `d`.
  void visit_items(size_t d, std::span<const Interval> items, int64_t shift, int64_t index, bool is_moved) {
    for (const Interval& item : items) {
      for (const Run& run : runs_of(dims_[d].dims, item.shifted(shift))) {
        const bool both = is_moved && run.is_moved;
        if (d + 1 == dims_.size()) {
          add({index + run.index, run.length, run.stride, both});
        } else {
          repeat(run.length, run.stride, [&](int64_t by) { visit(d + 1, index + run.index + by, both); });
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
    Held before = std::exchange(held_, {});
    const int64_t position = position_;
    list_once(0);
    const Held once = std::exchange(held_, std::move(before));
    const IntervalList& list = once.placed;
    const bool is_short = static_cast<int64_t>(list.size()) <= kMostInRepetition;
    if (is_short && once.moved == list && is_ascending(list) && span_of(list).extent() <= shift) {
      const std::vector<Interval> items(list.begin(), list.end());
      held_.placed.append_repeated(items, shift, count);
      held_.moved.append_repeated(items, shift, count);
      position_ = position + count * (position_ - position);
      check_runs();
      return;
    }
    for (const auto& block : list.blocks()) held_.placed.append(block);
    for (const auto& block : once.moved.blocks()) held_.moved.append(block);
    for (int64_t i = 1; i < count; ++i) list_once(i * shift);
  }

  // Returns the rows of the last dim in the interval, each divided at the beginning and end of the dim's range.
  static std::vector<Run> runs_of(const std::vector<Dim>& dims, const Interval& interval) {
    std::vector<Run> runs;
    const Dim& last = dims.back();
    for (int64_t at = interval.begin; at < interval.end;) {
      const int64_t row_begin = dims.size() == 1 ? 0 : at / last.size * last.size;
      const int64_t row_end = dims.size() == 1 ? interval.end : std::min(interval.end, row_begin + last.size);
      Run row{0, 0, last.stride, true};
      int64_t rest = last.size == 0 ? 0 : at / last.size;
      for (size_t d = dims.size() - 1; d-- > 0; rest /= std::max<int64_t>(dims[d].size, 1)) {
        const int64_t i = rest % dims[d].size - dims[d].begin;
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

  // Appends a run of the last local dim. Elements that are not moved get indices outside [0, num_indices_) that are
  // different on the two sides.
  void add(const Run& run) {
    if (!run.is_moved) {
      const Interval elsewhere = is_source_ ? Interval{num_indices_ + position_, num_indices_ + position_ + run.length}
                                            : Interval{-position_ - run.length, -position_};
      append(held_.placed, elsewhere);
    } else if (run.stride == 1 || run.length == 1) {
      append(held_.placed, {run.index, run.index + run.length});
      append(held_.moved, {run.index, run.index + run.length});
    } else {
      append_repeated(held_.placed, {run.index, run.index + 1}, run.stride, run.length);
      append_repeated(held_.moved, {run.index, run.index + 1}, run.stride, run.length);
    }
    check_runs();
    position_ += run.length;
  }

  // Throws UserError if there are too many runs.
  void check_runs() const {
    check_user(std::ssize(held_.placed.stored()) <= CutRule::kMaxRuns,
               "placements: number of runs in a part of the flattened dims must be at most 2^20 (a repeating "
               "block counts once), got more. First redistribute this tensor alone to a layout without flattened dims");
  }

  // Maximum number of intervals of a repeated block. Longer blocks are listed one by one.
  static constexpr int64_t kMostInRepetition = 4096;

  const std::vector<LocalDim>& dims_;
  std::vector<IntervalList> lists_;
  int64_t num_indices_;
  bool is_source_;
  int64_t position_ = 0;  // number of elements listed so far
  Held held_;             // the result
};

// Merges the last dim into the one before it while the rows of the last dim are contiguous, so that they are one
// interval.
void join_whole_rows(std::vector<LocalDim>& dims, std::vector<IntervalList>& lists) {
  while (dims.size() > 1) {
    const std::vector<Dim>& last = dims.back().dims;
    std::vector<Dim>& before = dims[dims.size() - 2].dims;
    if (last.size() > 1 || !last[0].is_whole() || lists.back() != IntervalList{{0, last[0].size}}) return;
    if (before.back().stride != last[0].size * last[0].stride) return;
    const int64_t row = last[0].size;
    Dim& joined = before.back();
    joined = {joined.size * row, joined.begin * row, joined.length * row, last[0].stride};
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
AxisGrid::Axis axis_of(const Group& group, const SideOfItem& from) {
  const Layout& layout = from.layout;
  const Mesh& mesh = layout.mesh();
  const std::vector<LocalDim> dims = local_dims_of(group, from);
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
    std::vector<LocalDim> seen = dims;
    join_whole_rows(seen, lists);
    Held held = Lister(seen, std::move(lists), num_elements(group, from), from.is_source).held();
    axis.lists.push_back(std::move(held.moved));
    axis.placed.push_back(std::move(held.placed));
    axis.local.push_back(std::move(local));
  }
  return axis;
}

// Returns the grid of one side.
AxisGrid grid_of(const SideOfItem& from, const std::vector<Group>& groups) {
  const Mesh& mesh = from.layout.mesh();
  AxisGrid grid{from.layout.mesh_ptr(), {}, std::vector<std::vector<int64_t>>(mesh.size())};
  for (const Group& group : groups) {
    grid.axes.push_back(axis_of(group, from));
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
