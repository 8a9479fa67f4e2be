// Checks pieces of items by round: everything is sent once, and no bucket overflows for any split of a load into
// messages.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "batch/schedule.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr int64_t kWhole = ItemPiece::kWhole;

TEST(Scheduler, MatchesTheExampleOfTheHeader) {
  Scheduler scheduler(4, 100);
  EXPECT_EQ(scheduler.add(0, {{0, 60, 1}, {1, 60, 1}}, 1), (std::vector<ItemPiece>{{0, 0, kWhole}}));
  const std::vector<ItemPiece> second = scheduler.add(1, {{1, 60, 1}, {2, 60, 1}}, 1);
  ASSERT_EQ(second.size(), 2);
  EXPECT_EQ(second[0].round, 0);
  EXPECT_EQ(second[1].round, 1);
  EXPECT_EQ(second[0].end, second[1].begin);
  EXPECT_EQ(ItemPiece::before(second[0].end, 60), 39);  // 2/3 in units of 2^-40, rounded down
  EXPECT_EQ(scheduler.add(2, {{2, 60, 1}, {3, 60, 1}}, 1), (std::vector<ItemPiece>{{0, 0, kWhole}}));
  EXPECT_EQ(scheduler.num_rounds(), 2);
  EXPECT_EQ(scheduler.largest_round_bytes(), 99);
}

TEST(Scheduler, RoundsHoldElementsOfOneSize) {
  Scheduler scheduler(2, 100);
  EXPECT_EQ(scheduler.add(0, {{0, 2, 1}, {1, 2, 1}}, 4)[0].round, 0);
  EXPECT_EQ(scheduler.add(1, {{0, 2, 1}, {1, 2, 1}}, 2)[0].round, 1);
  EXPECT_THROW(scheduler.add(2, {{0, 2, 1}, {1, 2, 1}}, 4), InvariantError);
}

TEST(Scheduler, ErrorNamesTheSmallestBucketThatSuffices) {
  Scheduler scheduler(2, 40);
  try {
    scheduler.add(7, {{0, 100, 6}, {1, 20, 1}}, 4);
    FAIL();
  } catch (const UserError& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find("bucket_bytes must be at least 48, got 40: item 7"), 0u) << text;
  }
  EXPECT_GT(Scheduler(2, 48).add(7, {{0, 100, 6}, {1, 20, 1}}, 4).size(), 1u);
}

// Returns random sizes for the messages of a load.
std::vector<int64_t> messages_of(const ItemLoad& load, std::mt19937& random) {
  std::vector<int64_t> messages(load.messages, 0);
  for (int64_t e = 0; e < load.elements; ++e) ++messages[random() % messages.size()];
  return messages;
}

TEST(Scheduler, NeverOverflowsABucket) {
  const unsigned seed = 20261122;
  std::mt19937 random(seed);
  const auto pick = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  int64_t pieces_seen = 0;
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t ranks = pick(1, 6);
    const int64_t bucket_bytes = pick(80, 2000);
    Scheduler scheduler(ranks, bucket_bytes);
    std::map<std::pair<int, int>, int64_t> used;  // bytes by round and rank
    std::map<int, int64_t> size_of_round;
    int64_t element_bytes = 8;
    for (int item = 0; item < 25; ++item) {
      if (pick(0, 5) == 0) element_bytes = std::max<int64_t>(element_bytes / 2, 1);
      std::vector<ItemLoad> loads;
      for (int rank = 0; rank < ranks; ++rank) {
        if (pick(0, 2) > 0) loads.push_back({rank, pick(1, 300), pick(1, 5)});
      }
      std::sort(loads.begin(), loads.end(),
                [](const ItemLoad& a, const ItemLoad& b) { return a.elements > b.elements; });
      const std::vector<ItemPiece> pieces = scheduler.add(item, loads, element_bytes);
      int64_t mark = 0;
      int last = -1;
      for (const ItemPiece& piece : pieces) {
        ASSERT_EQ(piece.begin, mark) << "seed " << seed << ", trial " << trial;
        ASSERT_GT(piece.round, last);
        ASSERT_EQ(size_of_round.try_emplace(piece.round, element_bytes).first->second, element_bytes);
        mark = piece.end;
        last = piece.round;
        ++pieces_seen;
      }
      ASSERT_EQ(mark, loads.empty() ? 0 : kWhole);
      for (const ItemLoad& load : loads) {
        int64_t moved = 0;
        for (const int64_t message : messages_of(load, random)) {
          for (const ItemPiece& piece : pieces) {
            const int64_t elements = ItemPiece::before(piece.end, message) - ItemPiece::before(piece.begin, message);
            used[{piece.round, load.rank}] += elements * element_bytes;
            moved += elements;
          }
        }
        ASSERT_EQ(moved, load.elements);
      }
    }
    for (const auto& [at, bytes] : used) {
      ASSERT_LE(bytes, bucket_bytes) << "seed " << seed << ", trial " << trial << ", round " << at.first;
      ASSERT_LE(bytes, scheduler.largest_round_bytes());
      ASSERT_LT(at.first, scheduler.num_rounds());
    }
  }
  EXPECT_GT(pieces_seen, 300 * 25);  // some items were split
}

}  // namespace
}  // namespace shardwright
