// Compares plans from one mesh to another with all plans of three legs on small meshes, and with lower bounds.
#include "search/two_meshes.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "exchange/bounds.h"
#include "layouts.h"
#include "moves/describe.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "search/make_plan.h"
#include "search/split.h"
#include "support/error.h"
#include "two_mesh_plans.h"
#include "two_meshes.h"

namespace shardwright {
namespace {

using test::ranks_from;

std::vector<StepOp> ops_of(const Plan& plan) {
  std::vector<StepOp> ops;
  for (const Step& step : plan.steps) ops.push_back(step.op);
  return ops;
}

// Checks that each step begins at the end of the one before it, and that one step crosses.
void expect_connected(const Plan& plan) {
  int64_t crossings = 0;
  const Layout* at = &plan.src;
  for (const Step& step : plan.steps) {
    ASSERT_EQ(step.before, *at) << to_string(plan);
    ASSERT_EQ(step.op == StepOp::kCross, !(step.before.mesh() == step.after.mesh()));
    crossings += step.op == StepOp::kCross;
    at = &step.after;
  }
  const Layout end = at->mesh() == plan.dst.mesh() ? *at : joined(*at, plan.dst.mesh_ptr()).value_or(*at);
  ASSERT_EQ(end, plan.dst) << to_string(plan);
  ASSERT_EQ(crossings > 0, crosses(plan));
}

TEST(TwoMeshes, PlansOfFewestBytesReachTheBounds) {
  const unsigned seed = 17;
  test::RandomPlacements random(seed);
  int64_t plans = 0;
  for (int i = 0; i < 1200; ++i) {
    const std::vector<int64_t> shape = random.shape(30);
    const Layout src = random.on_any_mesh(shape, 12).layout;
    const Layout dst = random.on_any_mesh(shape, 12).layout;
    if (src.mesh() == dst.mesh()) continue;
    SCOPED_TRACE(concat("seed ", seed, ", pair ", i));
    const Plan plan = make_plan(src, dst, {.objective = Objective::kBytes});
    expect_connected(plan);
    const TrafficTotals traffic = totals(plan);
    const ExchangeBound bound = exchange_bound(src, dst);
    ASSERT_EQ(traffic.received_bytes_max, bound.received_bytes_max) << to_string(plan);
    ASSERT_EQ(traffic.received_bytes_sum, bound.received_bytes_sum) << to_string(plan);
    ASSERT_EQ(traffic.sent_bytes_max, bound.direct_sent_bytes_max);
    ASSERT_EQ(traffic.steps, bound.received_bytes_sum > 0 ? 1 : 0);
    ASSERT_EQ(to_string(plan, &traffic), to_string(plan)) << "what a step receives, from all totals";
    ++plans;
  }
  EXPECT_GE(plans, 1000);
}

TEST(TwoMeshes, PlansAreNoFasterThanTheBoundAndNoSlowerThanADirectCrossing) {
  const unsigned seed = 23;
  test::RandomPlacements random(seed);
  for (int i = 0; i < 200; ++i) {
    const std::vector<int64_t> shape = random.shape(300);
    const Layout src = random.on_any_mesh(shape, 12).layout;
    const Layout dst = random.on_any_mesh(shape, 12).layout;
    if (src.mesh() == dst.mesh()) continue;
    Topology nodes = Topology::named("64x8");
    nodes.ranks_per_node = random.pick(0, 4);
    for (const Topology& topology : {nodes, Topology::named("gloo-local")}) {
      const PlanOptions options{.lowering = Lowering::kGloo, .topology = topology};
      const Plan plan = make_plan(src, dst, options);
      expect_connected(plan);
      const int64_t predicted = predicted_picoseconds(plan);
      ASSERT_GE(predicted, least_picoseconds(plan)) << to_string(plan);
      for (const ReplicaPolicy policy : {ReplicaPolicy::kWholeMessages, ReplicaPolicy::kEvenBytes}) {
        Plan direct = plan;
        direct.steps = {{StepOp::kCross, {}, src, dst, policy}};
        ASSERT_LE(predicted, predicted_picoseconds(direct)) << to_string(plan);
      }
    }
  }
}

TEST(TwoMeshes, TheBoundDoesNotOverflowOnSlowLinks) {
  const Link slow{0, Topology::kMaxValue};
  const Plan plan =
      make_plan(test::layout_of(test::mesh_of({1}), {256}, "R"), test::layout_of(test::mesh_of({1}, {1}), {256}, "R"),
                {.topology = Topology{"slow", 2, 0, 0, slow, slow, {}}});
  EXPECT_EQ(predicted_picoseconds(plan), Topology::kMaxValue);  // for 1 KiB
  EXPECT_EQ(least_picoseconds(plan), Topology::kMaxValue / 2);  // both links may be busy at the same time
}

// Tries all layouts before the crossing with all after it, each reached by its cheapest moves. The search skips a few
// cases in which other orders of cuts would send fewer messages.
TEST(TwoMeshes, FindsTheFastestPlanInAllButFewCases) {
  const std::vector<Placement> partials{Placement::partial(ReduceOp::kSum)};
  int64_t checked = 0;
  int64_t slower = 0;
  for (const int64_t n : {64, 2048}) {
    for (const char* name : {"64x8", "gloo-local"}) {
      const PlanOptions options{.topology = Topology::named(name)};
      const std::vector<int64_t> shape{n, n};
      const std::vector<Layout> sources = test::all_layouts(test::mesh_of({2, 8}), shape, partials);
      const std::vector<Layout> targets = test::all_layouts(test::mesh_of({3, 4}, ranks_from(12, 12)), shape, {});
      for (size_t pair = 3; pair < sources.size() * targets.size(); pair += 13) {
        const Layout& src = sources[pair % sources.size()];
        const Layout& dst = targets[pair / sources.size()];
        const Plan plan = make_plan(src, dst, options);
        const int64_t found = predicted_picoseconds(plan);
        int64_t fastest = found;
        for (const Layout& before : sources) {
          if (!before.partial_dims().empty()) continue;
          const int64_t first = predicted_picoseconds(make_plan(src, before, options));
          for (const Layout& after : targets) {
            if (first >= fastest) break;
            const int64_t around = first + predicted_picoseconds(make_plan(after, dst, options));
            for (const ReplicaPolicy policy : {ReplicaPolicy::kWholeMessages, ReplicaPolicy::kEvenBytes}) {
              if (around >= fastest) break;
              const Step step{StepOp::kCross, {}, before, after, policy};
              fastest = std::min(fastest, around + predicted_picoseconds(step, plan.lowering, plan.topology));
            }
          }
        }
        ++checked;
        slower += found > fastest;
        ASSERT_LE(static_cast<double>(found), 1.06 * static_cast<double>(fastest)) << to_string(plan);
      }
    }
  }
  EXPECT_GT(checked, 50);
  EXPECT_LE(slower, checked / 20);
}

TEST(TwoMeshes, ReducesBeforeAndGathersAfterTheCrossing) {
  const MeshPtr src_mesh = test::mesh_of({16});
  const MeshPtr dst_mesh = test::mesh_of({32}, ranks_from(16, 32));
  const Plan large =
      make_plan(test::layout_of(src_mesh, {4096, 4096}, "P"), test::layout_of(dst_mesh, {4096, 4096}, "R"));
  // The ranks of a node gather their parts last.
  EXPECT_EQ(ops_of(large),
            (std::vector<StepOp>{StepOp::kReduceScatter, StepOp::kCross, StepOp::kAllGather, StepOp::kAllGather}))
      << to_string(large);
  // For few bytes, a rank receives at most one message from another node.
  const Plan small = make_plan(test::layout_of(src_mesh, {8}, "P"), test::layout_of(dst_mesh, {8}, "R"));
  EXPECT_EQ(ops_of(small), (std::vector<StepOp>{StepOp::kReduceScatter, StepOp::kCross, StepOp::kAllGather}))
      << to_string(small);
  // The destination is a pending sum, so parts need not be gathered.
  const Plan sum =
      make_plan(test::layout_of(src_mesh, {4096, 4096}, "S(1)"), test::layout_of(dst_mesh, {4096, 4096}, "P"));
  EXPECT_EQ(ops_of(sum), (std::vector<StepOp>{StepOp::kCross, StepOp::kZeroFill})) << to_string(sum);
  const Plan mean = make_plan(test::layout_of(src_mesh, {8}, "R"), test::layout_of(dst_mesh, {8}, "P(avg)"));
  EXPECT_EQ(ops_of(mean), (std::vector<StepOp>{StepOp::kCross})) << to_string(mean);
}

// Limits the bytes that a rank may hold in between. Pending sums are reduced in any case.
TEST(TwoMeshes, KeepsToTheLimitOfHeldBytes) {
  const MeshPtr mesh = test::mesh_of({4});
  const Layout dst = test::layout_of(test::mesh_of({6}, ranks_from(4, 6)), {64, 64}, "S(1)");
  const PlanOptions options{.topology = Topology::named("gloo-local"), .max_held = 1};
  EXPECT_EQ(ops_of(make_plan(test::layout_of(mesh, {64, 64}, "S(0)"), dst, options)),
            std::vector<StepOp>{StepOp::kCross});
  EXPECT_EQ(ops_of(make_plan(test::layout_of(mesh, {64, 64}, "P"), dst, options)),
            (std::vector<StepOp>{StepOp::kAllReduce, StepOp::kCross}));
}

TEST(TwoMeshes, RejectsInvalidPairs) {
  const Layout src = test::layout_of(test::mesh_of({2}), {8}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({3}), {8}, "R");
  EXPECT_THROW(make_plan(src, dst, {.groups = {MeshDimSet::single(0)}}), UserError);
  EXPECT_THROW(make_plan(src, test::layout_of(test::mesh_of({3}), {8}, "P(product)")), UserError);
  EXPECT_THROW(make_plan(src, test::layout_of(test::mesh_of({3}), {9}, "R")), UserError);
  EXPECT_THROW(plan_through({test::layout_of(test::mesh_of({2}), {8}, "P"), dst}), UserError);
}

TEST(TwoMeshes, FollowsGivenLayouts) {
  const Layout src = test::layout_of(test::mesh_of({2}), {8}, "S(0)");
  const MeshPtr mesh = test::mesh_of({3}, {1, 2, 3});
  const Layout striped = test::layout_of(mesh, {8}, "S(0)");
  const Plan plan = plan_through({src, striped, test::layout_of(mesh, {8}, "R")});
  expect_connected(plan);
  EXPECT_EQ(ops_of(plan), (std::vector<StepOp>{StepOp::kCross, StepOp::kAllGather}));
}

// A rank that sends one message to each of many others takes as long as if it received as many.
TEST(TwoMeshes, CountsMessagesSent) {
  const Layout src = test::layout_of(test::mesh_of({1}), {2048}, "R");
  const Layout dst = test::layout_of(test::mesh_of({2048}, ranks_from(1, 2048)), {2048}, "S(0)");
  const Topology topology = Topology::named("64x8");
  const Plan there = plan_through({src, dst}, {.topology = topology});
  ASSERT_EQ(there.steps.size(), 1u);
  EXPECT_EQ(totals(there).messages_max, 1);
  EXPECT_EQ(totals(there).sent_messages_max, 2048);
  EXPECT_GE(predicted_picoseconds(there), topology.step_ps + 2048 * topology.between.message_ps);
  const Plan back = plan_through({dst, src}, {.topology = topology});
  ASSERT_EQ(back.steps.size(), 1u);
  EXPECT_EQ(totals(back).messages_max, 2048);
  EXPECT_EQ(totals(back).sent_messages_max, 1);
  EXPECT_NEAR(predicted_picoseconds(back), predicted_picoseconds(there), topology.step_ps);
}

// The traffic of a rank is that of the steps in which it takes part.
TEST(TwoMeshes, CountsTheStepsOfEveryRank) {
  const Layout src = test::layout_of(test::mesh_of({2}), {8}, "P");
  const MeshPtr mesh = test::mesh_of({2}, {1, 2});
  const Plan plan = plan_through({src, test::layout_of(test::mesh_of({2}), {8}, "S(0)"),
                                  test::layout_of(mesh, {8}, "S(0)"), test::layout_of(mesh, {8}, "R")});
  // Rank 0 receives a half and sends both; rank 1 receives three halves; rank 2 receives two halves.
  EXPECT_EQ(traffic_at(plan, Rank{0}), (Traffic{16, 32, 1, 2}));
  EXPECT_EQ(traffic_at(plan, Rank{1}), (Traffic{48, 48, 3, 3}));
  EXPECT_EQ(traffic_at(plan, Rank{2}), (Traffic{32, 16, 2, 1}));
  const TrafficTotals traffic = totals(plan);
  EXPECT_EQ(traffic.received_bytes_max, 48);
  EXPECT_EQ(traffic.received_bytes_sum, 96);
  EXPECT_EQ(traffic.sent_bytes_max, 48);
  EXPECT_EQ(traffic.messages_max, 3);
  EXPECT_EQ(traffic.steps, 3);
}

}  // namespace
}  // namespace shardwright
