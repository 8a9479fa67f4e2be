// Senders are chosen on the receiver's own node first. Compares the result with the optimum.
#include "exchange/node_local.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "exchange/grid_exchange.h"
#include "layouts.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "search/make_plan.h"
#include "support/error.h"
#include "two_meshes.h"

namespace shardwright {
namespace {

TEST(NodeSharing, MatchesTheExampleInTheHeader) {
  std::map<std::pair<Rank, Rank>, int64_t> found;
  const std::vector<Need> needs{{Rank{1}, 10}, {Rank{3}, 10}, {Rank{5}, 10}, {Rank{7}, 10}};
  for (const auto& [from, to, range] : assign_within_nodes({Rank{0}, Rank{2}}, needs, 2, 20)) {
    found[{from, to}] = range.end - range.begin;
  }
  const std::map<std::pair<Rank, Rank>, int64_t> expected{
      {{Rank{0}, Rank{1}}, 10}, {{Rank{2}, Rank{3}}, 10}, {{Rank{0}, Rank{5}}, 10}, {{Rank{2}, Rank{7}}, 10}};
  EXPECT_EQ(found, expected);
}

// Within a node, no more can be served than its ranks need and than its senders may send. The load of the busiest
// sender is at least the level up to which all loads are filled, found here element by element.
TEST(NodeSharing, ServesWithinNodesFirstAndBalancesTheRest) {
  std::mt19937 random(3);
  const auto pick = [&](int64_t a, int64_t b) { return std::uniform_int_distribution<int64_t>(a, b)(random); };
  for (int i = 0; i < 3000; ++i) {
    const int64_t ranks_per_node = pick(1, 4);
    std::vector<Rank> holders{Rank{0}};
    std::vector<Need> needs;
    int64_t needed = 0;
    for (int64_t r = 1, world = pick(2, 14); r < world; ++r) {
      const int64_t role = pick(0, 2);
      if (role == 0) holders.push_back(Rank{r});
      if (role != 1) continue;
      needs.push_back({Rank{r}, pick(1, 20)});
      needed += needs.back().elements;
    }
    const auto count_of_holders = static_cast<int64_t>(holders.size());
    const int64_t max_within_node = (needed + count_of_holders - 1) / count_of_holders + pick(0, 20);
    std::shuffle(holders.begin(), holders.end(), random);
    std::shuffle(needs.begin(), needs.end(), random);
    std::map<Rank, std::vector<Interval>> served;
    std::map<Rank, int64_t> inside;
    std::map<Rank, int64_t> sent;
    std::map<std::pair<Rank, Rank>, int> pairs;
    for (const auto& [from, to, range] : assign_within_nodes(holders, needs, ranks_per_node, max_within_node)) {
      ASSERT_LT(range.begin, range.end);
      ASSERT_EQ(++pairs[std::pair(from, to)], 1);
      ASSERT_NE(std::find(holders.begin(), holders.end(), from), holders.end());
      served[to].push_back(range);
      sent[from] += range.end - range.begin;
      if (to_int(from) / ranks_per_node == to_int(to) / ranks_per_node) inside[from] += range.end - range.begin;
    }
    std::map<int64_t, int64_t> needed_on;
    std::map<int64_t, std::vector<Rank>> holders_on;
    for (const Need& need : needs) {
      needed_on[to_int(need.rank) / ranks_per_node] += need.elements;
      std::vector<Interval>& ranges = served[need.rank];
      std::sort(ranges.begin(), ranges.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
      int64_t end = 0;
      for (const Interval& range : ranges) {
        ASSERT_EQ(range.begin, end);
        end = range.end;
      }
      ASSERT_EQ(end, need.elements);
    }
    for (const Rank rank : holders) holders_on[to_int(rank) / ranks_per_node].push_back(rank);
    int64_t left = 0;
    for (const auto& [node, elements] : needed_on) {
      const auto count = static_cast<int64_t>(holders_on[node].size());
      int64_t of_node = 0;
      for (const Rank rank : holders_on[node]) {
        ASSERT_LE(inside[rank], max_within_node);
        of_node += inside[rank];
      }
      ASSERT_EQ(of_node, std::min(elements, count * max_within_node));
      left += elements - of_node;
    }
    std::vector<int64_t> loads;
    int64_t most = 0;
    for (const Rank rank : holders) {
      loads.push_back(inside[rank]);
      most = std::max(most, sent[rank]);
    }
    for (; left > 0; --left) ++*std::min_element(loads.begin(), loads.end());
    ASSERT_EQ(most, *std::max_element(loads.begin(), loads.end())) << i;
  }
}

// Replicas on the receiver's own node serve it, and no data moves between nodes.
TEST(NodeSharing, KeepsReplicasOnTheirNodes) {
  const Layout src = test::layout_of(test::mesh_of({4, 8}), {8192, 8192}, "R,S(0)");
  const Layout dst = test::layout_of(test::mesh_of({2, 16}), {8192, 8192}, "R,S(0)");
  const Topology topology = Topology::named("64x8");
  EXPECT_TRUE(GridExchange(src, dst, ReplicaPolicy::kWholeMessages).crosses_nodes(8));
  EXPECT_FALSE(GridExchange(src, dst, ReplicaPolicy::kNodeLocal, 8).crosses_nodes(8));
  const Plan plan = make_plan(src, dst, {.topology = topology});
  ASSERT_EQ(plan.steps.size(), 1u);
  EXPECT_EQ(plan.steps[0].policy, ReplicaPolicy::kNodeLocal);
  Plan other = plan;
  other.steps[0].ranks_per_node = 0;
  for (const ReplicaPolicy policy : {ReplicaPolicy::kWholeMessages, ReplicaPolicy::kEvenBytes}) {
    other.steps[0].policy = policy;
    EXPECT_LT(predicted_picoseconds(plan), predicted_picoseconds(other));
  }
}

}  // namespace
}  // namespace shardwright
