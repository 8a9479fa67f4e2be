// Compares exchanges with lists of elements: what each rank needs and lacks, and which rank sends it.
#include "exchange/grid_exchange.h"

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

// Every element that a rank needs and lacks is sent by one rank that holds it, and nothing else is sent.
void expect_delivers(const GridExchange& exchange, const Placed& src, const Placed& dst, Counted& counted) {
  std::map<std::pair<Rank, Rank>, Interval> sent;
  for (const Rank rank : exchange.ranks()) {
    Rank last{-1};
    for (const GridExchange::PeerRange& one : exchange.ranges(rank, Direction::kSend)) {
      ASSERT_LT(last, one.peer);
      last = one.peer;
      sent[{rank, one.peer}] = one.range;
    }
  }
  size_t messages = 0;
  for (const Rank rank : exchange.ranks()) {
    const std::vector<int64_t> needed = elements_of(dst, rank);
    const std::vector<int64_t> kept = in_common(needed, elements_of(src, rank));
    std::multiset<int64_t> has(kept.begin(), kept.end());
    Rank last{-1};
    for (const GridExchange::PeerRange& one : exchange.ranges(rank, Direction::kReceive)) {
      ASSERT_LT(last, one.peer);
      ASSERT_NE(one.peer, rank);
      last = one.peer;
      ++messages;
      const auto found = sent.find({one.peer, rank});
      ASSERT_TRUE(found != sent.end() && found->second == one.range) << one.peer << " -> " << rank;
      const std::vector<int64_t> message = in_common(elements_of(src, one.peer), needed);
      const auto [begin, end] = one.range;
      ASSERT_TRUE(0 <= begin && begin < end && end <= static_cast<int64_t>(message.size()));
      has.insert(message.begin() + begin, message.begin() + end);
      counted.received[rank] += end - begin;
      counted.sent[one.peer] += end - begin;
      counted.largest_message = std::max(counted.largest_message, static_cast<int64_t>(message.size()));
    }
    ASSERT_EQ(has, std::multiset<int64_t>(needed.begin(), needed.end())) << "rank " << rank;
  }
  ASSERT_EQ(messages, sent.size());
}

// Divides the demand for each part evenly among the ranks that hold this part, and returns the maximum.
int64_t min_max_sent(const Placed& src, const Placed& dst) {
  std::map<std::vector<int64_t>, int64_t> holders;
  for (const auto& [rank, lists] : src.held) ++holders[elements_of(src, rank)];
  int64_t maximum = 0;
  for (const auto& [part, count] : holders) {
    int64_t wanted = 0;
    for (const auto& [rank, lists] : dst.held) {
      if (elements_of(src, rank) == part) continue;
      wanted += static_cast<int64_t>(in_common(part, elements_of(dst, rank)).size());
    }
    maximum = std::max(maximum, (wanted + count - 1) / count);
  }
  return maximum;
}

int64_t most(const std::map<Rank, int64_t>& of_ranks) {
  int64_t most = 0;
  for (const auto& [rank, elements] : of_ranks) most = std::max(most, elements);
  return most;
}

TEST(GridExchange, DeliversEveryElementOnceAndBalancesSenders) {
  const unsigned seed = 20261122;
  test::RandomPlacements random(seed);
  int64_t shared = 0;
  int64_t overlapping = 0;
  int64_t messages = 0;
  int64_t max_messages = 0;
  for (int i = 0; i < 1500; ++i) {
    const std::vector<int64_t> shape = random.shape(random.pick(1, 9));
    const int64_t world = random.pick(2, 14);
    const Placed src = random.on_any_mesh(shape, world);
    const Placed dst = random.on_any_mesh(shape, world);
    SCOPED_TRACE(concat("seed ", seed, ", pair ", i, ": ", src.layout.to_string(), " -> ", dst.layout.to_string()));
    const int64_t ranks_per_node = random.pick(1, 5);
    for (const ReplicaPolicy policy :
         {ReplicaPolicy::kEvenBytes, ReplicaPolicy::kWholeMessages, ReplicaPolicy::kNodeLocal}) {
      const GridExchange exchange(src.layout, dst.layout, policy, ranks_per_node);
      const GridExchange other =
          GridExchange(src.layout, dst.layout, ReplicaPolicy::kEvenBytes).with_policy(policy, ranks_per_node);
      for (const Rank rank : exchange.ranks())
        ASSERT_EQ(other.ranges(rank, Direction::kSend), exchange.ranges(rank, Direction::kSend)) << rank;
      Counted counted;
      expect_delivers(exchange, src, dst, counted);
      if (HasFatalFailure()) return;
      for (const Rank rank : exchange.ranks()) {
        ASSERT_EQ(exchange.num_elements(rank, Direction::kReceive), counted.received[rank]);
        ASSERT_EQ(exchange.num_elements(rank, Direction::kSend), counted.sent[rank]) << rank;
        const auto received = static_cast<int64_t>(exchange.ranges(rank, Direction::kReceive).size());
        ASSERT_EQ(exchange.messages_at_most(rank, Direction::kSend),
                  static_cast<int64_t>(exchange.ranges(rank, Direction::kSend).size()))
            << rank;
        ASSERT_GE(exchange.messages_at_most(rank, Direction::kReceive), received) << rank;
        if (policy == ReplicaPolicy::kEvenBytes) {
          messages += received;
          max_messages += exchange.messages_at_most(rank, Direction::kReceive);
        } else {
          ASSERT_EQ(exchange.messages_at_most(rank, Direction::kReceive), received) << rank;
        }
      }
      const int64_t least = min_max_sent(src, dst);
      if (policy == ReplicaPolicy::kEvenBytes) {
        ASSERT_EQ(most(counted.sent), least);
        shared += least > 0 && least < counted.largest_message;
      } else if (policy == ReplicaPolicy::kNodeLocal) {
        ASSERT_LE(most(counted.sent), (GridExchange::kMaxQuotasWithinNode + 1) * least);
      } else {
        ASSERT_LE(most(counted.sent), least + counted.largest_message);
      }
    }
    for (const auto& [rank, lists] : src.held) overlapping += dst.held.contains(rank);
  }
  EXPECT_GT(shared, 100);
  EXPECT_GT(overlapping, 1000);
  EXPECT_LE(max_messages * 4, messages * 5);
}

TEST(GridExchange, CountsMessagesInRounds) {
  test::RandomPlacements random(7);
  for (int i = 0; i < 100; ++i) {
    const std::vector<int64_t> shape = random.shape(7);
    const Placed src = random.on_any_mesh(shape, 8);
    const Placed dst = random.on_any_mesh(shape, 8);
    for (const ReplicaPolicy policy :
         {ReplicaPolicy::kEvenBytes, ReplicaPolicy::kWholeMessages, ReplicaPolicy::kNodeLocal}) {
      const GridExchange exchange(src.layout, dst.layout, policy, 3);
      for (const Rank rank : exchange.ranks()) {
        for (const int64_t rounds : {1, 2, 5}) {
          Traffic expected;
          for (const GridExchange::PeerRange& one : exchange.ranges(rank, Direction::kReceive)) {
            expected.received_bytes += (one.range.end - one.range.begin) * kItemBytes;
            expected.messages += std::min(rounds, one.range.end - one.range.begin);
          }
          for (const GridExchange::PeerRange& one : exchange.ranges(rank, Direction::kSend)) {
            expected.sent_bytes += (one.range.end - one.range.begin) * kItemBytes;
            expected.sent_messages += std::min(rounds, one.range.end - one.range.begin);
          }
          ASSERT_EQ(exchange.traffic(rank, rounds), expected);
        }
      }
    }
  }
}

// The table in the header.
TEST(GridExchange, MatchesTheExampleInTheHeader) {
  const Layout src = test::layout_of(test::mesh_of({2, 2}), {12}, "S(0),R");
  const Layout dst = test::layout_of(test::mesh_of({3}, {4, 5, 6}), {12}, "S(0)");
  const GridExchange exchange(src, dst, ReplicaPolicy::kEvenBytes);
  using Ranges = std::vector<GridExchange::PeerRange>;
  EXPECT_EQ(exchange.ranges(Rank{0}, Direction::kSend), (Ranges{{Rank{4}, {0, 3}}}));
  EXPECT_EQ(exchange.ranges(Rank{1}, Direction::kSend), (Ranges{{Rank{4}, {3, 4}}, {Rank{5}, {0, 2}}}));
  EXPECT_EQ(exchange.ranges(Rank{5}, Direction::kReceive), (Ranges{{Rank{1}, {0, 2}}, {Rank{2}, {0, 2}}}));
  EXPECT_EQ(exchange.ranges(Rank{2}, Direction::kSend), (Ranges{{Rank{5}, {0, 2}}, {Rank{6}, {0, 1}}}));
  EXPECT_EQ(exchange.ranges(Rank{3}, Direction::kSend), (Ranges{{Rank{6}, {1, 4}}}));
  EXPECT_TRUE(exchange.ranges(Rank{4}, Direction::kSend).empty());
  EXPECT_TRUE(exchange.ranges(Rank{9}, Direction::kReceive).empty());
  // No message is split, and each candidate sender sends one.
  const GridExchange whole(src, dst, ReplicaPolicy::kWholeMessages);
  EXPECT_EQ(whole.ranges(Rank{0}, Direction::kSend), (Ranges{{Rank{4}, {0, 4}}}));
  EXPECT_EQ(whole.ranges(Rank{1}, Direction::kSend), (Ranges{{Rank{5}, {0, 2}}}));
}

// Senders alternate in mesh order, and receivers are in mesh order too. So if every node has a replica of either side,
// each replica is served from its own node.
TEST(GridExchange, StaysWithinNodesIfEachNodeHasAReplica) {
  const Layout src = test::layout_of(test::mesh_of({4, 8}), {64, 64}, "R,S(0)");
  const Layout dst = test::layout_of(test::mesh_of({4, 2, 4}), {64, 64}, "R,S(1),S(0)");
  const Layout wider = test::layout_of(test::mesh_of({2, 16}), {64, 64}, "R,S(1)");
  for (const ReplicaPolicy policy : {ReplicaPolicy::kEvenBytes, ReplicaPolicy::kWholeMessages}) {
    EXPECT_FALSE(GridExchange(src, dst, policy).crosses_nodes(8));
    EXPECT_FALSE(GridExchange(src, wider, policy).crosses_nodes(8));
    EXPECT_TRUE(GridExchange(src, dst, policy).crosses_nodes(4));
    EXPECT_FALSE(GridExchange(src, dst, policy).crosses_nodes(0));
  }
}

// From 1,024 ranks to 2,048: 2 Mi messages in all, computed rank by rank.
TEST(GridExchange, SupportsThousandsOfRanks) {
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < 2048; ++r) ranks.push_back(1024 + r);
  const Layout src = test::layout_of(test::mesh_of({128, 8}), {8192, 4096}, "S(0),S(1)");
  const Layout dst = test::layout_of(test::mesh_of({2, 1024}, ranks), {8192, 4096}, "R,S(1)");
  const GridExchange exchange(src, dst, ReplicaPolicy::kEvenBytes);
  EXPECT_EQ(exchange.ranks().size(), 3072u);
  for (const Rank rank : exchange.ranks()) {
    const bool sends = to_int(rank) < 1024;
    ASSERT_EQ(exchange.ranges(rank, Direction::kSend).size(), sends ? 256u : 0u);
    ASSERT_EQ(exchange.ranges(rank, Direction::kReceive).size(), sends ? 0u : 128u);
    ASSERT_EQ(exchange.traffic(rank).sent_bytes, sends ? int64_t{64} * 512 * 2 * 4 : 0);
  }
}

}  // namespace
}  // namespace shardwright
