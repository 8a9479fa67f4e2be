#include "layout/region.h"

#include <algorithm>
#include <span>

namespace shardwright {
namespace {

// Returns all intervals of a list, in order.
std::vector<Interval> listed(const IntervalList& list) {
  if (list.has_repeats()) return {list.begin(), list.end()};
  return {list.stored().begin(), list.stored().end()};
}

// True if no interval begins before the end of the interval before it.
bool ascend(std::span<const Interval> intervals) {
  for (size_t i = 1; i < intervals.size(); ++i) {
    if (intervals[i].begin < intervals[i - 1].end) return false;
  }
  return true;
}

// True if one of the lists stores repetitions.
bool either_repeats(const IntervalList& a, const IntervalList& b) { return a.has_repeats() || b.has_repeats(); }

}  // namespace

// Ascending lists of one length are equal if they share all indices. Other lists are compared interval by interval.
bool operator==(const IntervalList& a, const IntervalList& b) {
  if (a.is_identical(b)) return true;
  if (!either_repeats(a, b) || a.size() != b.size() || length(a) != length(b)) return false;
  if (is_ascending(a) && is_ascending(b)) return intersection_length(a, b) == length(a);
  return listed(a) == listed(b);
}

int64_t length(const IntervalList& list) { return list.extent(); }

int64_t num_elements(const Region& region) {
  int64_t total = 1;
  for (const IntervalList& list : region) total *= length(list);
  return total;
}

std::vector<int64_t> shape_of(const Region& region) {
  std::vector<int64_t> shape;
  shape.reserve(region.size());
  for (const IntervalList& list : region) shape.push_back(length(list));
  return shape;
}

IntervalList subrange(const IntervalList& list, int64_t begin, int64_t end) { return list.part(begin, end); }

PieceList subrange(const PieceList& pieces, int64_t begin, int64_t end) { return pieces.part(begin, end); }

// Shifts block by block, so that repetitions stay stored once.
IntervalList shifted(const IntervalList& list, int64_t by) {
  IntervalList out;
  std::vector<Interval> intervals;
  for (const auto& [block, count, period] : list.blocks()) {
    intervals.clear();
    for (const Interval& interval : block) intervals.push_back(interval.shifted(by));
    out.append_repeated(intervals, period, count);
  }
  return out;
}

IntervalList moved_to_zero(const IntervalList& list) {
  return list.empty() || list.front().begin == 0 ? list : shifted(list, -list.front().begin);
}

bool is_ascending(const IntervalList& list) {
  if (!list.has_repeats()) return ascend(list.stored());
  int64_t end = INT64_MIN;
  bool ascends = true;
  list.for_each_block([&](const IntervalList::Block& block) {
    ascends = ascends && block.items.front().begin >= end && ascend(block.items);
    end = block.items.back().shifted(block.shift * (block.count - 1)).end;
  });
  return ascends;
}

Interval span_of(const IntervalList& list) {
  if (list.empty()) return {};
  Interval span = list.front();
  list.for_each_block([&](const IntervalList::Block& block) {
    for (const Interval& item : block.items) {
      span = {std::min(span.begin, item.begin), std::max(span.end, item.end + block.shift * (block.count - 1))};
    }
  });
  return span;
}

std::vector<Interval> sorted_by_begin(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  return intervals;
}

std::vector<Interval> sorted_by_begin(const IntervalList& list) { return sorted_by_begin(listed(list)); }

int64_t length(const PieceList& pieces) { return pieces.extent(); }

}  // namespace shardwright
