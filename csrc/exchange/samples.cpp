#include "exchange/samples.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <utility>

namespace shardwright {
namespace {

// Returns the smallest interval that contains all items.
Interval span_of_items(std::span<const Interval> items) {
  Interval span = items.front();
  for (const Interval& item : items) span = {std::min(span.begin, item.begin), std::max(span.end, item.end)};
  return span;
}

// A border between ranges of indices. Between two neighboring borders no list starts or stops repeating, and an
// interval that does not repeat contains all indices or none.
struct Border {
  std::vector<int64_t> begin;  // periods of the blocks that begin here
  std::vector<int64_t> end;    // periods of the blocks that end here
};

// Returns the borders of all lists, by index.
std::map<int64_t, Border> borders_of(const std::vector<const std::vector<IntervalList>*>& lists) {
  std::map<int64_t, Border> borders;
  for (const std::vector<IntervalList>* layout_lists : lists) {
    for (const IntervalList& list : *layout_lists) {
      for (const auto& [items, count, shift] : list.blocks()) {
        if (count > 1) {
          const Interval once = span_of_items(items);
          borders[once.begin].begin.push_back(shift);
          borders[once.end + (count - 1) * shift].end.push_back(shift);
          continue;
        }
        for (const Interval& item : items) borders[item.begin], borders[item.end];
      }
    }
  }
  return borders;
}

// Returns the least common multiple of periods; 0 if it is above a limit or there are no periods.
int64_t common_period(const std::multiset<int64_t>& periods, int64_t limit) {
  if (periods.empty()) return 0;
  int64_t common = 1;
  for (const int64_t period : periods) {
    const int64_t times = period / std::gcd(common, period);
    if (times > limit / common) return 0;
    common *= times;
  }
  return common;
}

}  // namespace

Samples::Samples(const std::vector<const std::vector<IntervalList>*>& lists, int64_t divisions) {
  const bool repeats = std::any_of(lists.begin(), lists.end(), [](const std::vector<IntervalList>* layout_lists) {
    return std::any_of(layout_lists->begin(), layout_lists->end(),
                       [](const IntervalList& list) { return list.has_repeats(); });
  });
  if (!repeats) {
    int64_t end = 0;
    for (const std::vector<IntervalList>* layout_lists : lists) {
      for (const IntervalList& list : *layout_lists) end = std::max(end, span_of(list).end);
    }
    add({0, end}, 0, divisions);
    return;
  }
  const std::map<int64_t, Border> borders = borders_of(lists);
  std::multiset<int64_t> periods;  // of the blocks that repeat between two borders
  for (auto at = borders.begin(); std::next(at) != borders.end(); ++at) {
    for (const int64_t period : at->second.end) periods.erase(periods.find(period));
    periods.insert(at->second.begin.begin(), at->second.begin.end());
    const Interval range{at->first, std::next(at)->first};
    add(range, common_period(periods, range.extent() / 2), divisions);
  }
}

void Samples::add(Interval range, int64_t period, int64_t divisions) {
  if (range.extent() == 0) return;
  if (period > 0) {
    const int64_t count = range.extent() / period;
    const int64_t samples = std::min(divisions, count);
    int64_t begin = range.begin;
    for (int64_t i = 0; i < samples; ++i) {
      const int64_t of_sample = count / samples + (i < count % samples ? 1 : 0);
      all_.push_back({{begin, begin + period}, of_sample});
      begin += of_sample * period;
    }
    return add({begin, range.end}, 0, divisions);
  }
  const bool extends_last = !all_.empty() && all_.back().count == 1 && all_.back().first.end == range.begin;
  if (extends_last) {
    all_.back().first.end = range.end;
  } else {
    all_.push_back({range, 1});
  }
}

const Sample& Samples::at(int64_t index) const {
  return *std::partition_point(all_.begin(), all_.end(), [&](const Sample& sample) {
    return sample.first.begin + sample.first.extent() * sample.count <= index;
  });
}

template <typename Visit>
void Samples::for_each_block(const IntervalList& list, const Visit& visit) const {
  for (const IntervalList::Block& block : list.blocks()) {
    const Interval once = span_of_items(block.items);  // first repetition of the block
    const int64_t end = once.end + (block.count - 1) * block.shift;
    const auto ends_before = [&](const Sample& sample) { return sample.first.end <= once.begin; };
    auto sample = std::partition_point(all_.begin(), all_.end(), ends_before);
    for (; sample != all_.end() && sample->first.begin < end; ++sample) {
      const Interval range = sample->first;
      int64_t first = 0;
      int64_t last = 1;
      if (block.count > 1) {
        first = std::max<int64_t>((range.begin - once.end) / block.shift, 0);
        last = std::min((range.end - once.begin + block.shift - 1) / block.shift, block.count);
      }
      if (first < last) visit(block, first, last, range);
    }
  }
}

std::vector<Interval> Samples::in(const IntervalList& list) const {
  std::vector<Interval> inside;
  for_each_block(list, [&](const IntervalList::Block& block, int64_t first, int64_t last, const Interval& range) {
    for (int64_t i = first; i < last; ++i) {
      for (const Interval& item : block.items) {
        const Interval repetition = item.shifted(i * block.shift);
        const Interval both{std::max(repetition.begin, range.begin), std::min(repetition.end, range.end)};
        if (both.begin < both.end) inside.push_back(both);
      }
    }
  });
  return sorted_by_begin(std::move(inside));
}

int64_t Samples::max_intervals_in(const IntervalList& list) const {
  auto most = static_cast<int64_t>(list.stored().size());
  for_each_block(list, [&](const IntervalList::Block& block, int64_t first, int64_t last, const Interval&) {
    // Intervals that do not repeat are listed once, divided at the ends of samples.
    most += block.count == 1 ? 1 : (last - first) * static_cast<int64_t>(block.items.size());
  });
  return most;
}

IntervalList Samples::repeated(const std::vector<Interval>& intervals) const {
  IntervalList all;
  for (auto begin = intervals.begin(); begin != intervals.end();) {
    const Sample& sample = at(begin->begin);
    const auto end = std::find_if(begin, intervals.end(),
                                  [&](const Interval& interval) { return interval.begin >= sample.first.end; });
    all.append_repeated(std::vector<Interval>(begin, end), sample.first.extent(), sample.count);
    begin = end;
  }
  return all;
}

std::vector<SampleRange> sample_ranges(const Samples& samples, const std::vector<const IntervalList*>& lists) {
  struct Change {
    std::vector<int64_t> begin;  // lists with an interval that begins here
    std::vector<int64_t> end;    // lists with an interval that ends here
  };
  std::map<int64_t, Change> changes;  // by index
  for (const Sample& sample : samples.all()) changes[sample.first.begin], changes[sample.first.end];
  for (size_t list_index = 0; list_index < lists.size(); ++list_index) {
    for (const Interval& interval : samples.in(*lists[list_index])) {
      changes[interval.begin].begin.push_back(static_cast<int64_t>(list_index));
      changes[interval.end].end.push_back(static_cast<int64_t>(list_index));
    }
  }
  std::vector<SampleRange> all;
  std::vector<int64_t> containing;  // lists that contain the indices from `at` on
  for (auto at = changes.begin(); at != changes.end(); ++at) {
    for (const int64_t list_index : at->second.end)
      containing.erase(std::find(containing.begin(), containing.end(), list_index));
    containing.insert(containing.end(), at->second.begin.begin(), at->second.begin.end());
    std::sort(containing.begin(), containing.end());
    if (!containing.empty())
      all.push_back({{at->first, std::next(at)->first}, containing, samples.at(at->first).count});
  }
  return all;
}

}  // namespace shardwright
