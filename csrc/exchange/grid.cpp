#include "exchange/grid.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "support/error.h"

namespace shardwright {
namespace {

// Returns the product of the sizes of these mesh dims.
int64_t product_of_sizes(const Mesh& mesh, const std::vector<int>& mesh_dims) {
  int64_t size = 1;
  for (const int d : mesh_dims) size *= mesh.dim_size(d);
  return size;
}

// Returns the position with these coordinates on `mesh_dims`, given as one index, and with 0 on the other mesh dims:
// the inverse of Mesh::coordinate_index. Positions for disjoint sets of mesh dims can be added.
int64_t position_of_index(const Mesh& mesh, const std::vector<int>& mesh_dims, int64_t index) {
  int64_t offset = 0;
  for (size_t i = mesh_dims.size(); i-- > 0;) {
    offset += index % mesh.dim_size(mesh_dims[i]) * mesh.stride(mesh_dims[i]);
    index /= mesh.dim_size(mesh_dims[i]);
  }
  return offset;
}

// Returns one window for each tensor dim, over all its indices.
std::vector<Window> full_windows(const Layout& layout) {
  std::vector<Window> windows;
  for (int t = 0; t < layout.ndim(); ++t) windows.push_back({t, 0, layout.shape()[t]});
  return windows;
}

// Returns the indices of a list that are in a window, counted from the window's beginning.
IntervalList indices_in(const Window& window, const IntervalList& list) {
  return shifted(shared_indices(list, {{window.begin, window.begin + window.length}}), -window.begin);
}

}  // namespace

Grid::Grid(const Layout& layout) : Grid(layout, full_windows(layout)) {}

Grid::Grid(const Layout& layout, const std::vector<Window>& windows) : mesh_(layout.mesh_ptr()) {
  check_invariant(layout.partial_dims().empty(), "the layout of a grid is partial: ", layout);
  for (int d = 0; d < mesh_->ndim(); ++d) {
    if (!layout.cut_dims().contains(d)) replicating_.push_back(d);
  }
  replicas_ = product_of_sizes(*mesh_, replicating_);
  for (const Window& window : windows) {
    const int t = window.tensor_dim;
    std::vector<int> cutting;
    std::vector<IntervalList> lists;
    std::vector<int64_t> first_positions;
    if (t == Window::kNoDim) {
      lists.push_back({{0, 1}});
      first_positions.push_back(0);
    } else {
      for (const Cut& cut : layout.cuts(t)) cutting.push_back(cut.mesh_dim);
      for (int64_t shard = 0; shard < product_of_sizes(*mesh_, cutting); ++shard) {
        IntervalList list = layout.part(t, Position{position_of_index(*mesh_, cutting, shard)});
        const bool is_full = window.begin == 0 && window.length == layout.shape()[t];
        first_positions.push_back(is_full ? 0 : intersection_length(list, {{0, window.begin}}));
        lists.push_back(is_full ? std::move(list) : indices_in(window, list));
      }
    }
    tensor_dims_.push_back(t);
    cutting_.push_back(std::move(cutting));
    lists_.push_back(std::move(lists));
    first_positions_.push_back(std::move(first_positions));
  }
  number_parts();
}

void Grid::number_parts() {
  shards_.resize(parts() * lists_.size());
  part_replicas_.reserve(mesh_->size());
  std::vector<int64_t> shards(lists_.size());
  for (int64_t p = 0; p < mesh_->size(); ++p) {
    for (size_t t = 0; t < shards.size(); ++t) shards[t] = mesh_->coordinate_index(p, cutting_[t]);
    const PartReplica part_replica{part_of(shards), mesh_->coordinate_index(p, replicating_)};
    std::copy(shards.begin(), shards.end(), shards_.begin() + part_replica.part * static_cast<int64_t>(shards.size()));
    part_replicas_.push_back(part_replica);
  }
}

std::optional<Grid::PartReplica> Grid::part_replica_of(Rank rank) const {
  const std::optional<Position> position = mesh_->position_of(rank);
  return position ? std::optional<PartReplica>(part_replicas_[*position]) : std::nullopt;
}

Rank Grid::rank_at(std::span<const int64_t> shards, int64_t replica) const {
  int64_t position = position_of_index(*mesh_, replicating_, replica);
  for (size_t t = 0; t < cutting_.size(); ++t) position += position_of_index(*mesh_, cutting_[t], shards[t]);
  return mesh_->rank_at(Position{position});
}

int64_t Grid::part_of(std::span<const int64_t> shards) const {
  int64_t part = 0;
  for (size_t t = 0; t < lists_.size(); ++t) part = part * static_cast<int64_t>(lists_[t].size()) + shards[t];
  return part;
}

Region Grid::region(int64_t part) const {
  Region region;
  for (int t = 0; t < ndim(); ++t) region.push_back(lists_[t][shards_of(part)[t]]);
  return region;
}

std::vector<LocalAxis> Grid::local_axes(int64_t part) const {
  std::vector<LocalAxis> axes;
  for (int t = 0; t < ndim(); ++t) {
    const int dim = tensor_dims_[t];
    axes.push_back(dim == Window::kNoDim ? LocalAxis{} : LocalAxis{{dim}, {}, first_positions_[t][shards_of(part)[t]]});
  }
  return axes;
}

namespace {

// An interval of a shard of the source.
struct ShardInterval {
  Interval interval;
  int64_t shard;
};

// Returns the intervals of all shards, ascending. Throws InvariantError if they overlap.
std::vector<ShardInterval> sorted_intervals(const std::vector<IntervalList>& lists) {
  std::vector<ShardInterval> all;
  for (size_t shard = 0; shard < lists.size(); ++shard) {
    for (const Interval& interval : lists[shard]) all.push_back({interval, static_cast<int64_t>(shard)});
  }
  std::sort(all.begin(), all.end(),
            [](const ShardInterval& a, const ShardInterval& b) { return a.interval.begin < b.interval.begin; });
  for (size_t i = 1; i < all.size(); ++i) {
    check_invariant(all[i - 1].interval.end <= all[i].interval.begin, "parts of the source overlap at index ",
                    all[i].interval.begin);
  }
  return all;
}

// Pairs of a shard of the source and a number of common elements. A shard may occur several times.
using ShardElements = std::vector<std::pair<int64_t, int64_t>>;

// Returns the overlaps of a list with the source's intervals, sorted by shard.
ShardElements overlaps_by_interval(const std::vector<ShardInterval>& src_intervals, const IntervalList& list) {
  ShardElements overlaps;
  for (const Interval& interval : list) {
    auto at = std::partition_point(src_intervals.begin(), src_intervals.end(), [&](const ShardInterval& src_interval) {
      return src_interval.interval.end <= interval.begin;
    });
    for (; at != src_intervals.end() && at->interval.begin < interval.end; ++at) {
      const int64_t begin = std::max(at->interval.begin, interval.begin);
      const int64_t end = std::min(at->interval.end, interval.end);
      overlaps.emplace_back(at->shard, end - begin);
    }
  }
  std::sort(overlaps.begin(), overlaps.end());
  return overlaps;
}

// Returns the overlaps of a list with each shard of the source, intersecting pairs of lists.
ShardElements overlaps_by_shard(const std::vector<IntervalList>& lists, const IntervalList& list) {
  ShardElements overlaps;
  int64_t total = 0;
  for (size_t shard = 0; shard < lists.size(); ++shard) {
    const int64_t elements = intersection_length(lists[shard], list);
    if (elements > 0) overlaps.emplace_back(static_cast<int64_t>(shard), elements);
    total += elements;
  }
  const int64_t needed = length(list);
  check_invariant(total <= needed, "parts of the source overlap: they have ", total, " elements in common with a part ",
                  "of the destination of ", needed, " elements");
  return overlaps;
}

// Intersecting two lists takes about as long as visiting this many of their intervals.
constexpr size_t kIntervalsPerPair = 32;

size_t num_intervals(const std::vector<IntervalList>& lists) {
  size_t intervals = 0;
  for (const IntervalList& list : lists) intervals += list.size();
  return intervals;
}

}  // namespace

ShardOverlaps::ShardOverlaps(const std::vector<IntervalList>& src, const std::vector<IntervalList>& dst) {
  const bool by_pairs = num_intervals(src) + num_intervals(dst) > src.size() * dst.size() * kIntervalsPerPair;
  const std::vector<ShardInterval> src_intervals = by_pairs ? std::vector<ShardInterval>() : sorted_intervals(src);
  of_src_.begins.assign(src.size() + 1, 0);  // first counts: entry s + 1 is the number of overlaps of shard s
  for (const IntervalList& list : dst) {
    const size_t begin = of_dst_.all.size();
    of_dst_.begins.push_back(begin);
    for (const auto& [shard, elements] :
         by_pairs ? overlaps_by_shard(src, list) : overlaps_by_interval(src_intervals, list)) {
      const bool is_first = of_dst_.all.size() == begin;
      if (is_first || of_dst_.all.back().shard != shard) {
        const int64_t before = is_first ? 0 : of_dst_.all.back().before + of_dst_.all.back().elements;
        of_dst_.all.push_back({shard, 0, before, 0});
        ++of_src_.begins[shard + 1];
      }
      of_dst_.all.back().elements += elements;
    }
  }
  of_dst_.begins.push_back(of_dst_.all.size());
  std::partial_sum(of_src_.begins.begin(), of_src_.begins.end(), of_src_.begins.begin());
  of_src_.all.resize(of_dst_.all.size());
  // Mirrors the entries of all destination shards, in ascending order, so the lists of the source ascend too.
  std::vector<size_t> next(of_src_.begins.begin(), of_src_.begins.end() - 1);  // by shard of the source
  for (size_t b = 0; b < dst.size(); ++b) {
    for (size_t i = of_dst_.begins[b]; i < of_dst_.begins[b + 1]; ++i) {
      Overlap& overlap = of_dst_.all[i];
      const size_t first = of_src_.begins[overlap.shard];
      const size_t at = next[overlap.shard]++;
      const int64_t before = at == first ? 0 : of_src_.all[at - 1].before + of_src_.all[at - 1].elements;
      of_src_.all[at] = {static_cast<int64_t>(b), overlap.elements, before,
                         static_cast<int64_t>(i - of_dst_.begins[b])};
      overlap.index = static_cast<int64_t>(at - first);
    }
  }
}

const ShardOverlaps::Overlap* ShardOverlaps::between(int64_t src_shard, int64_t dst_shard) const {
  const std::span<const Overlap> entries = of_src(src_shard);
  const auto found = std::partition_point(entries.begin(), entries.end(),
                                          [&](const Overlap& overlap) { return overlap.shard < dst_shard; });
  return found != entries.end() && found->shard == dst_shard ? &*found : nullptr;
}

}  // namespace shardwright
