#include "crossing/grid.h"

#include <algorithm>
#include <utility>

#include "support/error.h"

namespace shardwright {
namespace {

int64_t sizes_of(const Mesh& mesh, const std::vector<int>& mesh_dims) {
  int64_t size = 1;
  for (const int d : mesh_dims) size *= mesh.dim_size(d);
  return size;
}

// Returns the coordinates on some mesh dims as one number, the last of them fastest.
int64_t number_at(const Mesh& mesh, const std::vector<int>& mesh_dims, int64_t position) {
  int64_t number = 0;
  for (const int d : mesh_dims) number = number * mesh.dim_size(d) + mesh.coordinate(position, d);
  return number;
}

// The inverse of number_at: returns the position with these coordinates, and 0 on the other mesh dims.
int64_t offset_of(const Mesh& mesh, const std::vector<int>& mesh_dims, int64_t number) {
  int64_t offset = 0;
  for (size_t i = mesh_dims.size(); i-- > 0;) {
    offset += number % mesh.dim_size(mesh_dims[i]) * mesh.stride(mesh_dims[i]);
    number /= mesh.dim_size(mesh_dims[i]);
  }
  return offset;
}

std::vector<Window> whole(const Layout& layout) {
  std::vector<Window> windows;
  for (int t = 0; t < layout.ndim(); ++t) windows.push_back({t, 0, layout.shape()[t]});
  return windows;
}

// Returns the indices of a list in a window, counted from its beginning.
IntervalList seen_through(const Window& window, const IntervalList& list) {
  return shifted(shared_indices(list, {{window.begin, window.begin + window.length}}), -window.begin);
}

}  // namespace

Grid::Grid(const Layout& layout) : Grid(layout, whole(layout)) {}

Grid::Grid(const Layout& layout, const std::vector<Window>& windows) : mesh_(layout.mesh_ptr()) {
  check_invariant(layout.partial_dims().empty(), "a grid of ", layout.to_string(), ", which is partial");
  for (int d = 0; d < mesh_->ndim(); ++d) {
    if (!layout.cut_dims().contains(d)) replicating_.push_back(d);
  }
  replicas_ = sizes_of(*mesh_, replicating_);
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
      for (int64_t slot = 0; slot < sizes_of(*mesh_, cutting); ++slot) {
        IntervalList list = layout.part(t, Position{offset_of(*mesh_, cutting, slot)});
        const bool is_whole = window.begin == 0 && window.length == layout.shape()[t];
        first_positions.push_back(is_whole ? 0 : intersection_length(list, {{0, window.begin}}));
        lists.push_back(is_whole ? std::move(list) : seen_through(window, list));
      }
    }
    cutting_.push_back(std::move(cutting));
    lists_.push_back(std::move(lists));
    first_positions_.push_back(std::move(first_positions));
  }
}

Grid::Seat Grid::seat_at(int64_t position) const {
  Seat seat;
  seat.slots.reserve(cutting_.size());
  for (const std::vector<int>& cutting : cutting_) seat.slots.push_back(number_at(*mesh_, cutting, position));
  seat.replica = number_at(*mesh_, replicating_, position);
  return seat;
}

std::optional<Grid::Seat> Grid::seat_of(Rank rank) const {
  const std::optional<Position> position = mesh_->position_of(rank);
  return position ? std::optional<Seat>(seat_at(*position)) : std::nullopt;
}

Rank Grid::rank_at(std::span<const int64_t> slots, int64_t replica) const {
  int64_t position = offset_of(*mesh_, replicating_, replica);
  for (size_t t = 0; t < cutting_.size(); ++t) position += offset_of(*mesh_, cutting_[t], slots[t]);
  return mesh_->rank_at(Position{position});
}

int64_t Grid::index_of(std::span<const int64_t> slots) const {
  int64_t index = 0;
  for (size_t t = 0; t < lists_.size(); ++t) index = index * static_cast<int64_t>(lists_[t].size()) + slots[t];
  return index;
}

std::vector<int64_t> Grid::slots_of(int64_t index) const {
  std::vector<int64_t> slots(lists_.size());
  for (size_t t = lists_.size(); t-- > 0;) {
    slots[t] = index % static_cast<int64_t>(lists_[t].size());
    index /= static_cast<int64_t>(lists_[t].size());
  }
  return slots;
}

namespace {

struct Owned {
  Interval interval;
  int64_t slot;
};

std::vector<Owned> by_place(const std::vector<IntervalList>& lists) {
  std::vector<Owned> all;
  for (size_t slot = 0; slot < lists.size(); ++slot) {
    for (const Interval& interval : lists[slot]) all.push_back({interval, static_cast<int64_t>(slot)});
  }
  std::sort(all.begin(), all.end(), [](const Owned& a, const Owned& b) { return a.interval.begin < b.interval.begin; });
  for (size_t i = 1; i < all.size(); ++i) {
    check_invariant(all[i - 1].interval.end <= all[i].interval.begin, "parts of a source overlap at index ",
                    all[i].interval.begin);
  }
  return all;
}

// Slots of src, and elements in common; a slot may come several times.
using Runs = std::vector<std::pair<int64_t, int64_t>>;

Runs runs_met(const std::vector<Owned>& owned, const IntervalList& list) {
  Runs runs;
  for (const Interval& interval : list) {
    auto at = std::partition_point(owned.begin(), owned.end(),
                                   [&](const Owned& one) { return one.interval.end <= interval.begin; });
    for (; at != owned.end() && at->interval.begin < interval.end; ++at) {
      const int64_t begin = std::max(at->interval.begin, interval.begin);
      const int64_t end = std::min(at->interval.end, interval.end);
      runs.emplace_back(at->slot, end - begin);
    }
  }
  std::sort(runs.begin(), runs.end());
  return runs;
}

Runs slots_met(const std::vector<IntervalList>& lists, const IntervalList& list) {
  Runs runs;
  int64_t total = 0;
  for (size_t slot = 0; slot < lists.size(); ++slot) {
    const int64_t elements = intersection_length(lists[slot], list);
    if (elements > 0) runs.emplace_back(static_cast<int64_t>(slot), elements);
    total += elements;
  }
  check_invariant(total <= length(list), "parts of a source overlap");
  return runs;
}

// Meeting a pair of lists takes about as long as visiting so many of their intervals.
constexpr size_t kIntervalsPerPair = 32;

size_t num_intervals(const std::vector<IntervalList>& lists) {
  size_t intervals = 0;
  for (const IntervalList& list : lists) intervals += list.size();
  return intervals;
}

}  // namespace

SlotMeetings::SlotMeetings(const std::vector<IntervalList>& src, const std::vector<IntervalList>& dst)
    : of_src_(src.size()), of_dst_(dst.size()) {
  const bool by_pairs = num_intervals(src) + num_intervals(dst) > src.size() * dst.size() * kIntervalsPerPair;
  const std::vector<Owned> owned = by_pairs ? std::vector<Owned>() : by_place(src);
  for (size_t b = 0; b < dst.size(); ++b) {
    const Runs runs = by_pairs ? slots_met(src, dst[b]) : runs_met(owned, dst[b]);
    std::vector<Met>& met = of_dst_[b];
    for (const auto& [slot, elements] : runs) {
      if (met.empty() || met.back().slot != slot) {
        const int64_t before = met.empty() ? 0 : met.back().before + met.back().elements;
        met.push_back({slot, 0, before, 0});
      }
      met.back().elements += elements;
    }
    for (size_t i = 0; i < met.size(); ++i) {
      std::vector<Met>& theirs = of_src_[met[i].slot];
      const int64_t before = theirs.empty() ? 0 : theirs.back().before + theirs.back().elements;
      met[i].index = static_cast<int64_t>(theirs.size());
      theirs.push_back({static_cast<int64_t>(b), met[i].elements, before, static_cast<int64_t>(i)});
    }
  }
}

const SlotMeetings::Met* SlotMeetings::between(int64_t src_slot, int64_t dst_slot) const {
  const std::vector<Met>& met = of_src_[src_slot];
  const auto found = std::partition_point(met.begin(), met.end(), [&](const Met& one) { return one.slot < dst_slot; });
  return found != met.end() && found->slot == dst_slot ? &*found : nullptr;
}

}  // namespace shardwright
