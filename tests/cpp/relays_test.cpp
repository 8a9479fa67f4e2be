// Relays between meshes: their parts, and plans over them.
#include "search/relays.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "layouts.h"
#include "moves/describe.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "planning/certificate.h"
#include "planning/json.h"
#include "planning/memory_limit.h"
#include "planning/serialize.h"
#include "planning/validate.h"
#include "search/make_plan.h"
#include "search/over_relays.h"
#include "simulate/simulate.h"
#include "support/error.h"
#include "two_mesh_plans.h"
#include "two_meshes.h"

namespace shardwright {
namespace {

using test::expect_as_predicted;
using test::layout_of;
using test::mesh_of;
using test::ranks_from;

// Every message takes long, and bytes next to nothing.
Topology topology_of_slow_messages() {
  Topology topology = Topology::named("64x8");
  topology.inside.message_ps = topology.between.message_ps = 1'000'000'000;
  topology.step_ps = 1'000'000;
  return topology;
}

size_t levels_of_relays(const Plan& plan) { return meshes_of_relays(plan).size(); }
bool goes_over_relays(const Plan& plan) { return levels_of_relays(plan) > 0; }

std::vector<int64_t> elements_at(const Layout& layout, int64_t position) {
  std::vector<std::vector<int64_t>> lists;
  for (const IntervalList& list : layout.region(position)) {
    lists.emplace_back();
    for (const Interval& one : list) {
      for (int64_t i = one.begin; i < one.end; ++i) lists.back().push_back(i);
    }
  }
  return test::elements_of(lists, layout.shape());
}

// Random layouts: each relay holds its own part, all relays together hold what all ranks do, and a relay holds no more
// than the parts of the ranks in its block.
TEST(Relays, HoldWhatTheirBlocksHold) {
  const unsigned seed = 53;
  test::RandomPlacements random(seed);
  int64_t checked = 0;
  for (int i = 0; i < 300; ++i) {
    const Layout layout = random.on_any_mesh(random.shape(9), 12).layout;
    for (const Layout& relays : relays_of(layout, random.pick(1, 6))) {
      SCOPED_TRACE(concat("seed ", seed, ", layout ", i, ": ", layout.to_string(), ", ", relays.to_string()));
      ASSERT_LT(relays.mesh().size(), layout.mesh().size());
      std::multiset<int64_t> held;
      for (int64_t p = 0; p < relays.mesh().size(); ++p) {
        const std::vector<int64_t> of_relay = elements_at(relays, p);
        const std::optional<Position> own = layout.mesh().position_of(relays.mesh().rank_at(Position{p}));
        ASSERT_TRUE(own.has_value());
        const std::set<int64_t> all(of_relay.begin(), of_relay.end());
        for (const int64_t element : elements_at(layout, *own)) ASSERT_TRUE(all.contains(element));
        held.insert(of_relay.begin(), of_relay.end());
      }
      const int64_t replicas = relays.mesh().group_size(relays.replicated_dims());
      for (int64_t element = 0; element < layout.num_elements(); ++element) {
        ASSERT_EQ(static_cast<int64_t>(held.count(element)), replicas) << element;
      }
      ++checked;
    }
  }
  EXPECT_GT(checked, 200);
}

// Random layouts on nodes of two to four ranks: the node of each rank has a relay that holds the rank's part.
TEST(Relays, MayServeOnlyRanksOfTheirNode) {
  const unsigned seed = 61;
  test::RandomPlacements random(seed);
  int64_t checked = 0;
  for (int i = 0; i < 300; ++i) {
    const Layout layout = random.on_any_mesh(random.shape(9), 12).layout;
    const int64_t ranks_per_node = random.pick(2, 4);
    const std::optional<Layout> relays = relays_in_blocks(layout, random.pick(2, 4), ranks_per_node);
    if (!relays) continue;
    SCOPED_TRACE(concat("seed ", seed, ", layout ", i, ": ", layout.to_string(), ", ", relays->to_string()));
    for (int64_t p = 0; p < layout.mesh().size(); ++p) {
      const int64_t node = to_int(layout.mesh().rank_at(Position{p})) / ranks_per_node;
      const std::vector<int64_t> own = elements_at(layout, p);
      bool is_held = own.empty();
      for (int64_t q = 0; q < relays->mesh().size() && !is_held; ++q) {
        if (to_int(relays->mesh().rank_at(Position{q})) / ranks_per_node != node) continue;
        const std::vector<int64_t> of_relay = elements_at(*relays, q);
        const std::set<int64_t> all(of_relay.begin(), of_relay.end());
        is_held = std::all_of(own.begin(), own.end(), [&](int64_t element) { return all.contains(element); });
      }
      ASSERT_TRUE(is_held) << "position " << p;
    }
    ++checked;
  }
  EXPECT_GT(checked, 60);
}

// From few ranks to many and back, in even and uneven parts.
TEST(Relays, ReachManyRanksInFewMessages) {
  int64_t over_relays = 0;
  for (const auto& [few, many, rows] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
           {1, 36, 36}, {1, 40, 77}, {2, 64, 101}, {1, 49, 11}, {3, 50, 400}}) {
    for (const char* placements : {"S(0)", "Cyclic(0,2)"}) {
      const Layout at_few = layout_of(mesh_of({few}), {rows, 2}, "S(0)");
      const Layout at_many = layout_of(mesh_of({many}, ranks_from(few, many)), {rows, 2}, placements);
      for (const auto& [src, dst] : {std::pair(at_few, at_many), std::pair(at_many, at_few)}) {
        const Plan plan = make_plan(src, dst, {.topology = topology_of_slow_messages()});
        SCOPED_TRACE(to_string(plan));
        expect_as_predicted(plan);
        if (!goes_over_relays(plan)) continue;
        ++over_relays;
        const Plan straight = plan_through({src, dst}, {.topology = topology_of_slow_messages()});
        const auto messages = [](const Plan& one) {
          const TrafficTotals traffic = totals(one);
          return std::max(traffic.messages_max, traffic.sent_messages_max);
        };
        EXPECT_LT(messages(plan) * 3, messages(straight) * 2);
        EXPECT_LT(predicted_picoseconds(plan), predicted_picoseconds(straight));
        EXPECT_NE(to_json(plan, certify(plan, peak_bytes(plan)), {}).find("\"relay_meshes\""), std::string::npos);
      }
    }
  }
  EXPECT_GE(over_relays, 8);
}

// Relays pay if they save more than the time of another step, on any number of ranks.
TEST(Relays, AreUsedForFewRanksIfMessagesAreSlow) {
  const Layout src = layout_of(mesh_of({1}), {21, 4}, "R");
  const Layout dst = layout_of(mesh_of({7}, ranks_from(1, 7)), {21, 4}, "S(0)");
  const Plan plan = make_plan(src, dst, {.topology = topology_of_slow_messages()});
  ASSERT_TRUE(goes_over_relays(plan)) << to_string(plan);
  EXPECT_EQ(levels_of_relays(plan), 2);  // two relays reach four, which reach seven
  EXPECT_EQ(totals(plan).sent_messages_max, 2);
  expect_as_predicted(plan);
  expect_as_predicted(make_plan(dst, src, {.topology = topology_of_slow_messages()}));
  Topology of_slow_steps = topology_of_slow_messages();
  of_slow_steps.step_ps = 2 * of_slow_steps.inside.message_ps;
  EXPECT_FALSE(goes_over_relays(make_plan(src, dst, {.topology = of_slow_steps})));
}

TEST(Relays, MoveEveryElementOfRandomPairs) {
  const unsigned seed = 59;
  test::RandomPlacements random(seed);
  int64_t over_relays = 0;
  for (int i = 0; i < 40; ++i) {
    const std::vector<int64_t> shape{random.pick(1, 50), random.pick(1, 9)};
    const std::vector<int64_t> sizes{random.pick(12, 16), random.pick(1, 4)};
    const MeshPtr mesh = mesh_of(sizes, ranks_from(random.pick(0, 3), sizes[0] * sizes[1]));
    const Layout large = random.on(mesh, to_ints(mesh->ranks()), shape).layout;
    const Layout small = random.on_any_mesh(shape, 2).layout;
    if (small.mesh() == large.mesh()) continue;
    SCOPED_TRACE(concat("seed ", seed, ", pair ", i));
    for (const auto& [src, dst] : {std::pair(small, large), std::pair(large, small)}) {
      const Plan plan = make_plan(src, dst, {.topology = topology_of_slow_messages()});
      expect_as_predicted(plan);
      over_relays += goes_over_relays(plan);
    }
  }
  EXPECT_GE(over_relays, 4);
}

// 2,050 rows, cut or replicated; each rank must be reached.
TEST(Relays, ReachThousandsOfRanks) {
  const Topology topology = Topology::named("64x8");
  for (const char* placements : {"S(0)", "R"}) {
    for (const int64_t few : {1, 8}) {
      const Layout src = layout_of(mesh_of({few}), {2050, 64}, "R");
      const Layout dst = layout_of(mesh_of({2048}, ranks_from(8, 2048)), {2050, 64}, placements);
      const Plan plan = make_plan(src, dst, {.topology = topology});
      const TrafficTotals traffic = totals(plan);
      EXPECT_TRUE(goes_over_relays(plan) || few == 8) << to_string(plan);
      EXPECT_LE(std::max(traffic.messages_max, traffic.sent_messages_max), 130) << to_string(plan);
      // One crossing takes 2048 / few messages. Gathered stripes divide this number by few, and add the many messages
      // of the gather.
      EXPECT_LT(predicted_picoseconds(plan), 25 * least_picoseconds(plan)) << to_string(plan);
    }
  }
}

// The same crossings over relays in blocks of the given sizes, beginning with the relays next to the many ranks.
Plan over_blocks(const Layout& src, const Layout& dst, const std::vector<int64_t>& blocks, const Topology& topology) {
  std::vector<Layout> stops{dst};
  for (const int64_t ranks : blocks) stops.push_back(relays_in_blocks(stops.back(), ranks).value());
  stops.push_back(src);
  std::reverse(stops.begin(), stops.end());
  Plan plan = plan_through({src, dst}, {.topology = topology});
  plan.steps.clear();
  for (size_t i = 0; i + 1 < stops.size(); ++i) {
    plan.steps.push_back({StepOp::kCross, {}, stops[i], stops[i + 1], ReplicaPolicy::kWholeMessages});
  }
  return plan;
}

// One rank to 2,048 by a topology without nodes, with the times of a table in search/over_relays.h for each number of
// levels. Trees with fewer levels, of blocks of about equal size, take longer.
TEST(TreesOfRelays, HaveAsManyLevelsAsPay) {
  const Topology topology{"one link", 0, 12'000'000, 0, {4'000'000, 0}, {4'000'000, 0}, {}};
  for (const char* placements : {"R", "S(0)"}) {
    const Layout from = layout_of(mesh_of({1}), {2048}, "R");
    const Layout to = layout_of(mesh_of({2048}, ranks_from(1, 2048)), {2048}, placements);
    const std::vector<std::vector<int64_t>> trees{{}, {46}, {14, 14}, {7, 7, 7}, {5, 5, 5, 5}};
    const std::vector<int64_t> microseconds{8204, 384, 184, 144, 140};
    for (size_t i = 0; i < trees.size(); ++i) {
      EXPECT_EQ(predicted_picoseconds(over_blocks(from, to, trees[i], topology)) / 1'000'000, microseconds[i]) << i;
    }
    const Plan plan = make_plan(from, to, {.topology = topology});
    EXPECT_EQ(levels_of_relays(plan), 4) << to_string(plan);
    EXPECT_EQ(predicted_picoseconds(plan) / 1'000'000, 140) << to_string(plan);
    for (int64_t block = 2; block < 200; ++block) {
      EXPECT_GE(predicted_picoseconds(over_blocks(from, to, {block}, topology)), predicted_picoseconds(plan));
      if (block > 31) continue;
      EXPECT_GE(predicted_picoseconds(over_blocks(from, to, {block, block}, topology)), predicted_picoseconds(plan));
    }
  }
}

// The first rank of one node of eight sends to the first ranks of 256 others. No two relays are on one node, so the
// tree is as good as by a topology without nodes.
TEST(TreesOfRelays, AreFoundForNodesOfOneRank) {
  std::vector<int64_t> ranks;
  for (int64_t node = 1; node <= 256; ++node) ranks.push_back(node * 8);
  const Topology topology = Topology::named("64x8");
  Topology without_nodes = topology;
  without_nodes.ranks_per_node = 0;
  without_nodes.inside = without_nodes.between;
  const Layout from = layout_of(mesh_of({1}), {2048}, "R");
  for (const char* placements : {"R", "S(0)"}) {
    const Layout to = layout_of(mesh_of({256}, ranks), {2048}, placements);
    const Plan plan = make_plan(from, to, {.topology = topology});
    const Plan expected = make_plan(from, to, {.topology = without_nodes});
    EXPECT_GT(levels_of_relays(expected), 1) << to_string(expected);
    EXPECT_LE(predicted_picoseconds(plan), predicted_picoseconds(expected)) << to_string(plan);
  }
}

// One of 2,048 ranks has half of all rows, and each other rank has one row. The tree is that of 2,048 equal parts.
TEST(TreesOfRelays, LevelsDoNotDependOnPartSizes) {
  const Topology topology{"one link", 0, 12'000'000, 0, {4'000'000, 0}, {4'000'000, 0}, {}};
  std::string sizes = "2048";
  for (int i = 1; i < 2048; ++i) sizes += ":1";
  const Layout from = layout_of(mesh_of({1}), {4095}, "R");
  const Layout to = layout_of(mesh_of({2048}, ranks_from(1, 2048)), {4095}, concat("Ragged(0,", sizes, ")"));
  EXPECT_EQ(RelayShapes(to, topology).members(), 2048);
  EXPECT_EQ(RelayShapes(layout_of(mesh_of({4, 2}), {4}, "Ragged(0,3:0:1:0),R"), topology).members(), 4);
  const Plan plan = make_plan(from, to, {.topology = topology});
  EXPECT_EQ(levels_of_relays(plan), 4) << to_string(plan);
  EXPECT_EQ(predicted_picoseconds(plan) / 1'000'000, 140) << to_string(plan);
}

// From 1 to 3 ranks to up to 90 and back. A message takes as long as a thousand steps. Destinations are replicas,
// stripes, or both, with parts of one row or none.
TEST(TreesOfRelays, MoveEveryElement) {
  size_t deepest = 0;
  for (const auto& [few, many, rows, placements] :
       std::vector<std::tuple<int64_t, std::vector<int64_t>, int64_t, std::string>>{{1, {90}, 4, "R"},
                                                                                    {1, {90}, 200, "S(0)"},
                                                                                    {1, {61}, 40, "S(0)"},
                                                                                    {3, {64}, 37, "R"},
                                                                                    {2, {4, 16}, 50, "R, S(0)"},
                                                                                    {2, {8, 8}, 50, "S(0), R"},
                                                                                    {1, {8, 8}, 50, "S(0), S(1)"},
                                                                                    {1, {77}, 100, "Cyclic(0,1)"},
                                                                                    {3, {80}, 31, "Blocks(0,4)"}}) {
    for (const char* at_few : {"R", "S(0)"}) {
      const Layout small = layout_of(mesh_of({few}), {rows, 9}, at_few);
      int64_t ranks = 1;
      for (const int64_t size : many) ranks *= size;
      const Layout large = layout_of(mesh_of(many, ranks_from(few, ranks)), {rows, 9}, placements);
      for (const auto& [src, dst] : {std::pair(small, large), std::pair(large, small)}) {
        const Plan plan = make_plan(src, dst, {.topology = topology_of_slow_messages()});
        SCOPED_TRACE(to_string(plan));
        expect_as_predicted(plan);
        check_steps(plan);
        deepest = std::max(deepest, levels_of_relays(plan));
        const Certificate certificate = certify(plan, peak_bytes(plan));
        EXPECT_GE(certificate.predicted_ps, certificate.least_ps);
      }
    }
  }
  EXPECT_GE(deepest, 4);
}

TEST(Relays, AreRejectedIfInvalid) {
  const Layout src = layout_of(mesh_of({1}), {64}, "R");
  const Layout dst = layout_of(mesh_of({16}, ranks_from(1, 16)), {64}, "S(0)");
  const Layout outside = layout_of(mesh_of({4}, ranks_from(20, 4)), {64}, "S(0)");
  const Layout relays = layout_of(mesh_of({4}, {1, 5, 9, 13}), {64}, "S(0)");
  const auto through = [&](const std::vector<Layout>& layouts) {
    Plan plan = plan_through({src, dst}, {});
    plan.steps.clear();
    for (size_t i = 0; i + 1 < layouts.size(); ++i) {
      plan.steps.push_back({StepOp::kCross, {}, layouts[i], layouts[i + 1], ReplicaPolicy::kEvenBytes});
    }
    return plan;
  };
  EXPECT_NO_THROW(from_bytes(to_bytes(through({src, relays, dst}))));
  EXPECT_THROW(check_steps(through({src, outside, dst})), UserError);
  EXPECT_THROW(check_steps(through({src, relays, outside, dst})), UserError);
  EXPECT_THROW(check_steps(through({src, relays})), UserError);
}

}  // namespace
}  // namespace shardwright
