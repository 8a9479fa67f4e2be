// Compares samples of repeating lists, and products of lists, with lists of elements.
#include "exchange/samples.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "layout/cut_rule.h"
#include "layout/product.h"
#include "support/error.h"

namespace shardwright {
namespace {

using Elements = std::vector<int64_t>;

Elements elements_of(const std::vector<Interval>& intervals) {
  Elements all;
  for (const Interval& one : intervals) {
    for (int64_t i = one.begin; i < one.end; ++i) all.push_back(i);
  }
  return all;
}
Elements elements_of(const IntervalList& list) { return elements_of(std::vector<Interval>(list.begin(), list.end())); }

class RandomLists {
 public:
  explicit RandomLists(unsigned seed) : random_(seed) {}
  int64_t pick(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random_); }

  // Returns the part of a coordinate of n elements after one or two cuts.
  IntervalList list(int64_t n) {
    IntervalList list{{0, n}};
    for (int64_t cuts = pick(1, 2); cuts > 0; --cuts) {
      const int64_t k = pick(1, 4);
      const CutRule rule = pick(0, 3) == 0 ? CutRule(pick(1, 9)) : CutRule::cyclic(pick(1, 4));
      list = rule.part(list, k, pick(0, k - 1));
    }
    return list;
  }

 private:
  std::mt19937 random_;
};

// The samples of a list, repeated, make the list, and no interval spans two samples.
TEST(Samples, RepeatToTheWholeLists) {
  const unsigned seed = 71;
  RandomLists random(seed);
  int64_t smaller = 0;
  for (int i = 0; i < 400; ++i) {
    SCOPED_TRACE(concat("seed ", seed, ", lists ", i));
    const int64_t n = random.pick(1, 600);
    std::vector<IntervalList> a, b;
    for (int64_t lists = random.pick(1, 3); lists > 0; --lists) a.push_back(random.list(n));
    for (int64_t lists = random.pick(0, 2); lists > 0; --lists) b.push_back(random.list(n));
    const Samples samples({&a, &b}, random.pick(1, 4));
    for (const std::vector<IntervalList>* lists : {&a, &b}) {
      for (const IntervalList& list : *lists) {
        const std::vector<Interval> inside = samples.in(list);
        for (const Interval& one : inside) {
          const Sample& sample = samples.at(one.begin);
          ASSERT_TRUE(sample.first.begin <= one.begin && one.end <= sample.first.end);
        }
        ASSERT_EQ(elements_of(samples.repeated(inside)), elements_of(list));
        EXPECT_GE(samples.max_intervals_in(list), std::ssize(inside));
        smaller += inside.size() < list.size() / 2;
      }
    }
  }
  EXPECT_GT(smaller, 100);
}

TEST(Product, HasTheElementsOfRowsAndColumns) {
  const unsigned seed = 73;
  RandomLists random(seed);
  for (int i = 0; i < 400; ++i) {
    SCOPED_TRACE(concat("seed ", seed, ", lists ", i));
    const int64_t height = random.pick(1, 60);
    const int64_t width = random.pick(1, 60);
    const IntervalList rows = random.list(height);
    const IntervalList columns = random.list(width);
    Elements expected;
    for (const int64_t row : elements_of(rows)) {
      for (const int64_t column : elements_of(columns)) expected.push_back(row * width + column);
    }
    const std::optional<IntervalList> product = product_of(rows, columns, width, CutRule::kMaxRuns);
    ASSERT_TRUE(product.has_value());
    ASSERT_EQ(elements_of(*product), expected);
    EXPECT_FALSE(expected.empty() ? false : product_of(rows, columns, width, 0).has_value());
  }
}

// Cases: a million rows whose columns repeat, and repeating rows whose columns are one run.
TEST(Product, StoresRepetitionsOnce) {
  IntervalList few;
  append_repeated(few, {1, 2}, 8, 125'000);
  for (const auto& [rows, columns, size] :
       std::vector<std::tuple<IntervalList, IntervalList, int64_t>>{{{{0, 1'000'000}}, {{1, 3}}, 4},
                                                                    {few, {{1, 3}}, 4},
                                                                    {few, {{0, 1}, {2, 3}}, 4},
                                                                    {{{2, 5}}, few, 1'000'003}}) {
    const std::optional<IntervalList> product = product_of(rows, columns, size, CutRule::kMaxRuns);
    ASSERT_TRUE(product.has_value());
    EXPECT_EQ(length(*product), length(rows) * length(columns));
    EXPECT_LE(product->stored().size(), 16u);
  }
  IntervalList nothing_repeats;
  for (int64_t i = 0; i < 3'000; ++i) append(nothing_repeats, {i * i, i * i + 1});
  EXPECT_FALSE(product_of(nothing_repeats, nothing_repeats, 9'000'000, CutRule::kMaxRuns).has_value());
}

// Listing the columns of one row exceeds the limit; those of all rows, stored with repetitions, do not.
TEST(Product, IsLimitedByStoredItemsOnly) {
  const auto columns = [](int64_t count) {
    IntervalList list;
    append_repeated(list, {0, 1}, 2, count);
    append_repeated(list, {20, 21}, 5, count);
    return list;
  };
  IntervalList rows_apart;
  append_repeated(rows_apart, {0, 1}, 2, 4);
  for (const auto& [rows, count, most] :
       std::vector<std::tuple<IntervalList, int64_t, int64_t>>{{{{0, 3}}, 4, 6}, {rows_apart, 5, 8}}) {
    EXPECT_GT(std::ssize(columns(count)), most);
    const std::optional<IntervalList> product = product_of(rows, columns(count), 50, most);
    ASSERT_TRUE(product.has_value());
    EXPECT_EQ(std::ssize(*product), length(rows) * 2 * count);
    EXPECT_EQ(std::ssize(product->stored()), most);
    EXPECT_FALSE(product_of(rows, columns(count), 50, most - 1).has_value());
  }
}

}  // namespace
}  // namespace shardwright
