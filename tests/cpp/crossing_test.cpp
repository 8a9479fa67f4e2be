// Compares crossings with lists of elements: who needs what and does not hold it, and who sends it.
#include "crossing/crossing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "layouts.h"
#include "support/error.h"
#include "two_meshes.h"

namespace shardwright {
namespace {

using test::in_common;
using test::Placed;

constexpr int64_t kItemBytes = 4;

struct Counted {
  std::map<Rank, int64_t> received;
  std::map<Rank, int64_t> sent;
  int64_t largest_message = 0;
};

// Every element that a rank needs and does not hold comes from one rank that holds it, and nothing else is sent.
void expect_delivers(const Crossing& crossing, const Placed& src, const Placed& dst, Counted& counted) {
  std::map<std::pair<Rank, Rank>, Interval> sent;
  for (const Rank rank : crossing.ranks()) {
    Rank last{-1};
    for (const Crossing::Parcel& parcel : crossing.sends(rank)) {
      ASSERT_LT(last, parcel.peer);
      last = parcel.peer;
      sent[{rank, parcel.peer}] = parcel.range;
    }
  }
  size_t parcels = 0;
  for (const Rank rank : crossing.ranks()) {
    const std::vector<int64_t> needed = elements_of(dst, rank);
    const std::vector<int64_t> kept = in_common(needed, elements_of(src, rank));
    std::multiset<int64_t> has(kept.begin(), kept.end());
    Rank last{-1};
    for (const Crossing::Parcel& parcel : crossing.receives(rank)) {
      ASSERT_LT(last, parcel.peer);
      ASSERT_NE(parcel.peer, rank);
      last = parcel.peer;
      ++parcels;
      const auto found = sent.find({parcel.peer, rank});
      ASSERT_TRUE(found != sent.end() && found->second == parcel.range) << parcel.peer << " -> " << rank;
      const std::vector<int64_t> message = in_common(elements_of(src, parcel.peer), needed);
      const auto [begin, end] = parcel.range;
      ASSERT_TRUE(0 <= begin && begin < end && end <= static_cast<int64_t>(message.size()));
      has.insert(message.begin() + begin, message.begin() + end);
      counted.received[rank] += end - begin;
      counted.sent[parcel.peer] += end - begin;
      counted.largest_message = std::max(counted.largest_message, static_cast<int64_t>(message.size()));
    }
    ASSERT_EQ(has, std::multiset<int64_t>(needed.begin(), needed.end())) << "rank " << rank;
  }
  ASSERT_EQ(parcels, sent.size());
}

// For each set of ranks that hold the same part: what others need of it, divided evenly.
int64_t least_worst_sender(const Placed& src, const Placed& dst) {
  std::map<std::vector<int64_t>, int64_t> holders;
  for (const auto& [rank, lists] : src.held) ++holders[elements_of(src, rank)];
  int64_t worst = 0;
  for (const auto& [part, count] : holders) {
    int64_t wanted = 0;
    for (const auto& [rank, lists] : dst.held) {
      if (elements_of(src, rank) == part) continue;
      wanted += static_cast<int64_t>(in_common(part, elements_of(dst, rank)).size());
    }
    worst = std::max(worst, (wanted + count - 1) / count);
  }
  return worst;
}

int64_t most(const std::map<Rank, int64_t>& of_ranks) {
  int64_t most = 0;
  for (const auto& [rank, elements] : of_ranks) most = std::max(most, elements);
  return most;
}

TEST(Crossing, DeliversEveryElementOnceAndSharesTheSending) {
  const unsigned seed = 20261122;
  test::RandomPlacements random(seed);
  int64_t shared = 0;
  int64_t overlapping = 0;
  int64_t parcels = 0;
  int64_t parcels_at_most = 0;
  for (int i = 0; i < 1500; ++i) {
    const std::vector<int64_t> shape = random.shape(random.pick(1, 9));
    const int64_t world = random.pick(2, 14);
    const Placed src = random.on_any_mesh(shape, world);
    const Placed dst = random.on_any_mesh(shape, world);
    SCOPED_TRACE(concat("seed ", seed, ", pair ", i, ": ", src.layout.to_string(), " -> ", dst.layout.to_string()));
    const int64_t ranks_per_node = random.pick(1, 5);
    for (const Sharing sharing : {Sharing::kBytes, Sharing::kMessages, Sharing::kNodes}) {
      const Crossing crossing(src.layout, dst.layout, sharing, ranks_per_node);
      const Crossing other = Crossing(src.layout, dst.layout, Sharing::kBytes).shared_by(sharing, ranks_per_node);
      for (const Rank rank : crossing.ranks()) ASSERT_EQ(other.sends(rank), crossing.sends(rank)) << rank;
      Counted counted;
      expect_delivers(crossing, src, dst, counted);
      if (HasFatalFailure()) return;
      for (const Rank rank : crossing.ranks()) {
        ASSERT_EQ(crossing.received_elements(rank), counted.received[rank]);
        ASSERT_EQ(crossing.sent_elements(rank), counted.sent[rank]) << rank;
        const auto received = static_cast<int64_t>(crossing.receives(rank).size());
        ASSERT_EQ(crossing.parcels_sent(rank), static_cast<int64_t>(crossing.sends(rank).size())) << rank;
        ASSERT_GE(crossing.parcels_received_at_most(rank), received) << rank;
        if (sharing == Sharing::kBytes) {
          parcels += received;
          parcels_at_most += crossing.parcels_received_at_most(rank);
        } else {
          ASSERT_EQ(crossing.parcels_received_at_most(rank), received) << rank;
        }
      }
      const int64_t least = least_worst_sender(src, dst);
      if (sharing == Sharing::kBytes) {
        ASSERT_EQ(most(counted.sent), least);
        shared += least > 0 && least < counted.largest_message;
      } else if (sharing == Sharing::kNodes) {
        ASSERT_LE(most(counted.sent), (Crossing::kMostInside + 1) * least);
      } else {
        ASSERT_LE(most(counted.sent), least + counted.largest_message);
      }
    }
    for (const auto& [rank, lists] : src.held) overlapping += dst.held.contains(rank);
  }
  EXPECT_GT(shared, 100);
  EXPECT_GT(overlapping, 1000);
  EXPECT_LE(parcels_at_most * 4, parcels * 5);
}

TEST(Crossing, CountsMessagesInRounds) {
  test::RandomPlacements random(7);
  for (int i = 0; i < 100; ++i) {
    const std::vector<int64_t> shape = random.shape(7);
    const Placed src = random.on_any_mesh(shape, 8);
    const Placed dst = random.on_any_mesh(shape, 8);
    for (const Sharing sharing : {Sharing::kBytes, Sharing::kMessages, Sharing::kNodes}) {
      const Crossing crossing(src.layout, dst.layout, sharing, 3);
      for (const Rank rank : crossing.ranks()) {
        for (const int64_t rounds : {1, 2, 5}) {
          Traffic expected;
          for (const Crossing::Parcel& parcel : crossing.receives(rank)) {
            expected.received_bytes += (parcel.range.end - parcel.range.begin) * kItemBytes;
            expected.messages += std::min(rounds, parcel.range.end - parcel.range.begin);
          }
          for (const Crossing::Parcel& parcel : crossing.sends(rank)) {
            expected.sent_bytes += (parcel.range.end - parcel.range.begin) * kItemBytes;
            expected.sent_messages += std::min(rounds, parcel.range.end - parcel.range.begin);
          }
          ASSERT_EQ(crossing.at(rank, rounds), expected);
        }
      }
    }
  }
}

// The table in the header.
TEST(Crossing, ServesStretchesOfALine) {
  const Layout src = test::layout_of(test::mesh_of({2, 2}), {12}, "S(0),R");
  const Layout dst = test::layout_of(test::mesh_of({3}, {4, 5, 6}), {12}, "S(0)");
  const Crossing crossing(src, dst, Sharing::kBytes);
  using Parcels = std::vector<Crossing::Parcel>;
  EXPECT_EQ(crossing.sends(Rank{0}), (Parcels{{Rank{4}, {0, 3}}}));
  EXPECT_EQ(crossing.sends(Rank{1}), (Parcels{{Rank{4}, {3, 4}}, {Rank{5}, {0, 2}}}));
  EXPECT_EQ(crossing.receives(Rank{5}), (Parcels{{Rank{1}, {0, 2}}, {Rank{2}, {0, 2}}}));
  EXPECT_EQ(crossing.sends(Rank{2}), (Parcels{{Rank{5}, {0, 2}}, {Rank{6}, {0, 1}}}));
  EXPECT_EQ(crossing.sends(Rank{3}), (Parcels{{Rank{6}, {1, 4}}}));
  EXPECT_TRUE(crossing.sends(Rank{4}).empty());
  EXPECT_TRUE(crossing.receives(Rank{9}).empty());
  // No message is split, and each holder sends one.
  const Crossing whole(src, dst, Sharing::kMessages);
  EXPECT_EQ(whole.sends(Rank{0}), (Parcels{{Rank{4}, {0, 4}}}));
  EXPECT_EQ(whole.sends(Rank{1}), (Parcels{{Rank{5}, {0, 2}}}));
}

// Holders take turns in mesh order, and needers stand in it. So where every node has a replica of either side, each
// replica is served from its own node.
TEST(Crossing, StaysWithinNodesThatHoldAndNeedAll) {
  const Layout src = test::layout_of(test::mesh_of({4, 8}), {64, 64}, "R,S(0)");
  const Layout dst = test::layout_of(test::mesh_of({4, 2, 4}), {64, 64}, "R,S(1),S(0)");
  const Layout wider = test::layout_of(test::mesh_of({2, 16}), {64, 64}, "R,S(1)");
  for (const Sharing sharing : {Sharing::kBytes, Sharing::kMessages}) {
    EXPECT_FALSE(Crossing(src, dst, sharing).crosses_nodes(8));
    EXPECT_FALSE(Crossing(src, wider, sharing).crosses_nodes(8));
    EXPECT_TRUE(Crossing(src, dst, sharing).crosses_nodes(4));
    EXPECT_FALSE(Crossing(src, dst, sharing).crosses_nodes(0));
  }
}

// From 1,024 ranks to 2,048: 2 Mi parcels in all, computed rank by rank.
TEST(Crossing, TakesThousandsOfRanks) {
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < 2048; ++r) ranks.push_back(1024 + r);
  const Layout src = test::layout_of(test::mesh_of({128, 8}), {8192, 4096}, "S(0),S(1)");
  const Layout dst = test::layout_of(test::mesh_of({2, 1024}, ranks), {8192, 4096}, "R,S(1)");
  const Crossing crossing(src, dst, Sharing::kBytes);
  EXPECT_EQ(crossing.ranks().size(), 3072u);
  for (const Rank rank : crossing.ranks()) {
    const bool sends = number(rank) < 1024;
    ASSERT_EQ(crossing.sends(rank).size(), sends ? 256u : 0u);
    ASSERT_EQ(crossing.receives(rank).size(), sends ? 0u : 128u);
    ASSERT_EQ(crossing.at(rank).sent_bytes, sends ? int64_t{64} * 512 * 2 * 4 : 0);
  }
}

}  // namespace
}  // namespace shardwright
