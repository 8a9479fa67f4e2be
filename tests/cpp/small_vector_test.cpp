#include "support/small_vector.h"

#include <gtest/gtest.h>

#include <random>
#include <utility>
#include <vector>

namespace shardwright {
namespace {

std::vector<int> items(const SmallVector<int>& some) { return {some.begin(), some.end()}; }

// Appends to, copies and moves two vectors at random, and compares with two of std::vector.
TEST(SmallVector, MatchesStdVector) {
  const unsigned seed = 5;
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    SmallVector<int> mine[2];
    std::vector<int> expected[2];
    for (int step = 0; step < 12; ++step) {
      const size_t one = random() % 2;
      switch (random() % 6) {
        case 0:
          mine[one] = mine[1 - one];
          expected[one] = expected[1 - one];
          break;
        case 1:
          mine[one] = std::move(mine[1 - one]);
          mine[1 - one] = {};
          expected[one] = std::exchange(expected[1 - one], {});
          break;
        case 2: {
          SmallVector<int> copy(mine[one]);
          mine[one] = SmallVector<int>(std::move(copy));
          break;
        }
        case 3:
          if (expected[one].empty()) break;
          mine[one].push_back(mine[one].front());
          expected[one].push_back(expected[one].front());
          break;
        default:
          mine[one].push_back(round + step);
          expected[one].push_back(round + step);
      }
      for (size_t i = 0; i < 2; ++i) {
        ASSERT_EQ(items(mine[i]), expected[i]) << "seed " << seed << ", round " << round << ", step " << step;
        ASSERT_EQ(mine[i].empty(), expected[i].empty());
        if (!expected[i].empty()) {
          ASSERT_EQ(mine[i].back(), expected[i].back());
        }
      }
      ASSERT_EQ(mine[0] == mine[1], expected[0] == expected[1]);
    }
  }
}

// Vectors with no item, with one inline item, and with more.
TEST(SmallVector, IsEmptyAfterBeingMovedFrom) {
  for (int count = 0; count < 4; ++count) {
    for (const bool is_assigned : {false, true}) {
      SCOPED_TRACE(testing::Message() << count << " items, " << (is_assigned ? "assigned" : "constructed"));
      std::vector<int> expected;
      SmallVector<int> from;
      for (int i = 0; i < count; ++i) {
        from.push_back(i);
        expected.push_back(i);
      }
      SmallVector<int> assigned;
      assigned.push_back(5);
      if (is_assigned) assigned = std::move(from);
      const SmallVector<int> to(is_assigned ? std::move(assigned) : std::move(from));
      EXPECT_EQ(from.size(), 0u);
      EXPECT_TRUE(from.empty());
      for (int i = 7; i < 10; ++i) from.push_back(i);
      EXPECT_EQ(items(from), (std::vector<int>{7, 8, 9}));
      EXPECT_EQ(items(to), expected);
    }
  }
}

TEST(SmallVector, IsUnchangedBySelfAssignment) {
  SmallVector<int> some;
  for (int i = 0; i < 3; ++i) some.push_back(i);
  const SmallVector<int>& same = some;
  some = same;
  EXPECT_EQ(items(some), (std::vector<int>{0, 1, 2}));
}

}  // namespace
}  // namespace shardwright
