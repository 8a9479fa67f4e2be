#include "crossing/samples.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <utility>

namespace shardwright {
namespace {

Interval span_of_items(std::span<const Interval> items) {
  Interval span = items.front();
  for (const Interval& item : items) span = {std::min(span.begin, item.begin), std::max(span.end, item.end)};
  return span;
}

// Between two borders no list begins or ends to repeat, and what does not repeat is all there or not at all.
struct Border {
  std::vector<int64_t> begin;  // the periods of what repeats from here on
  std::vector<int64_t> end;    // and of what does no longer
};

std::map<int64_t, Border> borders_of(const std::vector<const std::vector<IntervalList>*>& lists) {
  std::map<int64_t, Border> borders;
  for (const std::vector<IntervalList>* some : lists) {
    for (const IntervalList& list : *some) {
      for (const auto& [items, count, shift] : list.blocks()) {
        if (count > 1) {
          const Interval once = span_of_items(items);
          borders[once.begin].begin.push_back(shift);
          borders[once.end + (count - 1) * shift].end.push_back(shift);
          continue;
        }
        for (const Interval& one : items) borders[one.begin], borders[one.end];
      }
    }
  }
  return borders;
}

// Returns the least common multiple of periods, or 0 if it is above a limit or there are none.
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

Samples::Samples(const std::vector<const std::vector<IntervalList>*>& lists) {
  const bool repeats = std::any_of(lists.begin(), lists.end(), [](const std::vector<IntervalList>* some) {
    return std::any_of(some->begin(), some->end(), [](const IntervalList& list) { return list.has_repeats(); });
  });
  if (!repeats) {
    int64_t end = 0;
    for (const std::vector<IntervalList>* some : lists) {
      for (const IntervalList& list : *some) end = std::max(end, span_of(list).end);
    }
    add({0, end}, 0);
    return;
  }
  const std::map<int64_t, Border> borders = borders_of(lists);
  std::multiset<int64_t> periods;
  for (auto at = borders.begin(); std::next(at) != borders.end(); ++at) {
    for (const int64_t period : at->second.end) periods.erase(periods.find(period));
    periods.insert(at->second.begin.begin(), at->second.begin.end());
    const Interval range{at->first, std::next(at)->first};
    add(range, common_period(periods, range.extent() / 2));
  }
}

void Samples::add(Interval range, int64_t period) {
  if (range.extent() == 0) return;
  if (period > 0) {
    const int64_t count = range.extent() / period;
    all_.push_back({{range.begin, range.begin + period}, count});
    return add({range.begin + count * period, range.end}, 0);
  }
  const bool follows = !all_.empty() && all_.back().count == 1 && all_.back().first.end == range.begin;
  if (follows) {
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

std::vector<Interval> Samples::in(const IntervalList& list) const {
  std::vector<Interval> inside;
  for (const auto& [items, count, shift] : list.blocks()) {
    const Interval block = span_of_items(items);
    const int64_t end = block.end + (count - 1) * shift;
    auto sample =
        std::partition_point(all_.begin(), all_.end(), [&](const Sample& one) { return one.first.end <= block.begin; });
    for (; sample != all_.end() && sample->first.begin < end; ++sample) {
      const auto [first, last] = sample->first;
      const int64_t skipped = count > 1 ? std::max<int64_t>((first - block.end) / shift, 0) : 0;
      for (int64_t i = skipped; i < count && block.begin + i * shift < last; ++i) {
        for (const Interval& item : items) {
          const Interval both{std::max(item.begin + i * shift, first), std::min(item.end + i * shift, last)};
          if (both.begin < both.end) inside.push_back(both);
        }
      }
    }
  }
  return sorted_by_place(std::move(inside));
}

IntervalList Samples::repeated(const std::vector<Interval>& intervals) const {
  IntervalList all;
  for (auto begin = intervals.begin(); begin != intervals.end();) {
    const Sample& sample = at(begin->begin);
    const auto end =
        std::find_if(begin, intervals.end(), [&](const Interval& one) { return one.begin >= sample.first.end; });
    all.append_repeated(std::vector<Interval>(begin, end), sample.first.extent(), sample.count);
    begin = end;
  }
  return all;
}

}  // namespace shardwright
