#include "layout/repeating_list.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "layout/region.h"

namespace shardwright {
namespace {

// A plain vector with the same calls, as a reference.
class Listed {
 public:
  void append(const Interval& interval) {
    if (!items_.empty() && items_.back().end == interval.begin) {
      items_.back().end = interval.end;
    } else {
      items_.push_back(interval);
    }
  }
  void append_repeated(const std::vector<Interval>& sequence, int64_t shift, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      for (const Interval& one : sequence) append({one.begin + i * shift, one.end + i * shift});
    }
  }
  const std::vector<Interval>& items() const { return items_; }
  int64_t end() const { return items_.empty() ? 0 : items_.back().end; }

  std::vector<int64_t> elements() const {
    std::vector<int64_t> all;
    for (const Interval& one : items_) {
      for (int64_t i = one.begin; i < one.end; ++i) all.push_back(i);
    }
    return all;
  }

 private:
  std::vector<Interval> items_;
};

std::vector<int64_t> elements(const IntervalList& list) {
  std::vector<int64_t> all;
  for (const Interval& one : list) {
    for (int64_t i = one.begin; i < one.end; ++i) all.push_back(i);
  }
  return all;
}

void expect_same(const IntervalList& list, const Listed& expected) {
  const std::vector<Interval>& items = expected.items();
  ASSERT_EQ(std::vector<Interval>(list.begin(), list.end()), items);
  ASSERT_EQ(list.size(), items.size());
  ASSERT_EQ(list.empty(), items.empty());
  ASSERT_EQ(list.extent(), static_cast<int64_t>(expected.elements().size()));
  for (size_t i = 0; i < items.size(); ++i) ASSERT_EQ(list[i], items[i]) << i;
  if (!items.empty()) {
    ASSERT_EQ(list.front(), items.front());
    ASSERT_EQ(list.back(), items.back());
  }
  std::vector<Interval> from_blocks;
  for (const auto& [block, count, shift] : list.blocks()) {
    for (int64_t i = 0; i < count; ++i) {
      for (const Interval& one : block) from_blocks.push_back(one.shifted(shift * i));
    }
  }
  ASSERT_EQ(from_blocks, items);
}

// Any sequence of calls makes the same list as the plain vector, and no two stored items could be merged.
TEST(RepeatingList, MatchesAPlainVector) {
  for (unsigned seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto pick = [&](int64_t least, int64_t most) {
      return std::uniform_int_distribution<int64_t>(least, most)(random);
    };
    IntervalList list;
    Listed expected;
    for (int64_t call = 0, calls = pick(1, 5); call < calls; ++call) {
      std::vector<Interval> sequence;
      int64_t at = expected.end() + pick(0, 2);
      for (int64_t i = 0, items = pick(1, 3); i < items; ++i) {
        sequence.push_back({at, at + pick(1, 3)});
        at = sequence.back().end + pick(0, 2);
      }
      if (pick(0, 2) == 0) {
        for (const Interval& one : sequence) {
          list.append(one);
          expected.append(one);
        }
        continue;
      }
      const int64_t shift = std::max<int64_t>(at, sequence.back().end) - sequence.front().begin;
      const int64_t count = pick(0, 9);
      list.append_repeated(sequence, shift, count);
      expected.append_repeated(sequence, shift, count);
    }
    ASSERT_NO_FATAL_FAILURE(expect_same(list, expected));
    const std::vector<int64_t> all = expected.elements();
    const auto n = static_cast<int64_t>(all.size());
    for (int i = 0; i < 20; ++i) {
      const int64_t begin = pick(0, n);
      const int64_t end = pick(begin, n);
      const IntervalList part = list.part(begin, end);
      ASSERT_EQ(elements(part), std::vector<int64_t>(all.begin() + begin, all.begin() + end)) << begin << " " << end;
    }
  }
}

TEST(RepeatingList, StoresRepetitionsOnce) {
  IntervalList list;
  append_repeated(list, {0, 1}, 8, int64_t{1} << 40);
  EXPECT_EQ(list.size(), size_t{1} << 40);
  EXPECT_EQ(list.stored().size(), 1u);
  EXPECT_EQ(list.back(), (Interval{((int64_t{1} << 40) - 1) * 8, ((int64_t{1} << 40) - 1) * 8 + 1}));
  const IntervalList most = list.part(1, (int64_t{1} << 40) - 1);
  EXPECT_EQ(most.front(), (Interval{8, 9}));
  EXPECT_LE(most.stored().size(), 3u);
}

TEST(RepeatingList, MergesAdjacentRepetitions) {
  IntervalList list;
  append_repeated(list, {0, 8}, 8, 1000);
  EXPECT_EQ(list, (IntervalList{{0, 8000}}));
  // 0-1 4-6 | 6-7 10-12 | ...: the last of one repetition and the first of the next.
  IntervalList wrapped;
  const std::vector<Interval> sequence{{0, 1}, {4, 6}};
  wrapped.append_repeated(sequence, 6, 5);
  EXPECT_EQ(std::vector<Interval>(wrapped.begin(), wrapped.end()),
            (std::vector<Interval>{{0, 1}, {4, 7}, {10, 13}, {16, 19}, {22, 25}, {28, 30}}));
}

}  // namespace
}  // namespace shardwright
