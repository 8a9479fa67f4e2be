// Plans between two meshes whose tensor goes in segments: every element, what ranks receive, their memory, and times.
#include "moves/segments.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "crossing/bounds.h"
#include "layouts.h"
#include "moves/figures.h"
#include "moves/traffic.h"
#include "planning/fit.h"
#include "planning/serialize.h"
#include "program/memory.h"
#include "program/program.h"
#include "search/make_plan.h"
#include "simulate/simulate.h"
#include "support/error.h"
#include "two_mesh_plans.h"
#include "two_meshes.h"

namespace shardwright {
namespace {

using test::ranks_from;
using test::with_nodes;

// The example in the header.
TEST(InSegments, AreStretchesOfCells) {
  const Layout src = test::layout_of(test::mesh_of({4}), {16}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({2}, {4, 5}), {16}, "S(0)");
  Plan plan = plan_through({src, dst}, {});
  EXPECT_EQ(cell_length(plan, 0), 4);
  plan.segments = {0, 2};
  EXPECT_TRUE(may_go_in(plan, plan.segments));
  EXPECT_FALSE(may_go_in(plan, {0, 8}));
  EXPECT_FALSE(may_go_in(plan, {1, 2}));
  EXPECT_EQ(plan_of_segment(plan).src.shape(), std::vector<int64_t>{8});
  EXPECT_EQ(plan_of_segment(plan).dst.region(1), (Region{{{4, 8}}}));
  simulate(plan);
  // Uneven parts, of 6, 6 and 4 rows, are made of cells of 2.
  const Layout three = test::layout_of(test::mesh_of({3}, {4, 5, 6}), {16}, "S(0)");
  Plan uneven = plan_through({src, three}, {});
  EXPECT_EQ(cell_length(uneven, 0), 2);
  uneven.segments = {0, 2};
  simulate(uneven);
  EXPECT_EQ(to_bytes(from_bytes(to_bytes(uneven))), to_bytes(uneven));
  // Those that are cut again are not.
  const Layout again = test::layout_of(test::mesh_of({3, 2}, ranks_from(4, 6)), {16}, "S(0),S(0)");
  EXPECT_EQ(cell_length(plan_through({src, again}, {}), 0), 0);
}

// Rules that make equal parts have cells too, whatever sizes they name.
TEST(InSegments, MayBeCutByRules) {
  for (const char* placements :
       {"Cyclic(0,2)", "Cyclic(0,4)", "Blocks(0,4)", "Ragged(0,4:4:4:4)", "Ragged(0,2:8:0:6)", "Packed(0,8:8)"}) {
    for (const char* others : {"S(0),R", "Owned(0,0),S(0)", "S(1),Packed(0,8:8)"}) {
      const Layout cut = test::layout_of(test::mesh_of({4}), {16, 3}, placements);
      const std::vector<int64_t> sizes = others[0] == 'O' ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{2, 2};
      const Layout other = test::layout_of(test::mesh_of(sizes, ranks_from(4, sizes[0] * 2)), {16, 3}, others);
      SCOPED_TRACE(concat(cut.to_string(), ", ", other.to_string()));
      for (Plan plan : {plan_through({cut, other}, {}), plan_through({other, cut}, {})}) {
        plan.segments = {0, 2};
        ASSERT_TRUE(may_go_in(plan, plan.segments));
        simulate(plan);
        EXPECT_EQ(to_bytes(from_bytes(to_bytes(plan))), to_bytes(plan));
      }
    }
  }
}

// Layouts that flatten dims have fewer of them.
TEST(InSegments, AreNotOfFlattenedDims) {
  const Layout src = test::layout_of(test::mesh_of({2}), {6, 4}, "P");
  const Layout dst(test::mesh_of({2}, {2, 3}), {6, 4}, src.dtype(), {Placement::parse("Ragged(0,4:20)")}, {},
                   StridedMeaning::kAuto, 2);
  const Plan plan = make_plan(src, dst, {});
  ASSERT_GE(plan.steps.size(), 2u);
  EXPECT_EQ(plan.segments, Segments());
  simulate(plan);
}

// In all segments that are possible, ranks receive what they do without, and need the memory that is said.
TEST(InSegments, MoveEveryElementOfRandomPairs) {
  const unsigned seed = 31;
  test::RandomPlacements random(seed);
  int64_t moved = 0;
  int64_t with_several_steps = 0;
  for (int i = 0; i < 120; ++i) {
    std::vector<int64_t> shape{16 * random.pick(1, 3), 8 * random.pick(1, 4)};
    if (random.pick(0, 2) == 0) shape.push_back(random.pick(1, 4));
    const Layout src = random.on_any_mesh(shape, 12).layout;
    const Layout dst = random.on_any_mesh(shape, 12).layout;
    if (src.mesh() == dst.mesh()) continue;
    const Lowering& lowering = random.pick(0, 1) == 0 ? Lowering::kGloo : Lowering::kNccl;
    Topology topology = with_nodes(random.pick(1, 4));
    if (random.pick(0, 1) == 0) topology.step_ps = topology.inside.message_ps = topology.between.message_ps = 1;
    Plan plan = make_plan(src, dst, {.lowering = lowering, .topology = topology});
    plan.segments = {};
    const TrafficTotals whole = totals(plan);
    for (int t = 0; t < src.ndim(); ++t) {
      for (const int64_t count : {2, 4, 8}) {
        plan.segments = {t, count};
        if (!may_go_in(plan, plan.segments)) continue;
        SCOPED_TRACE(concat("seed ", seed, ", pair ", i, ", ", count, " segments of dim ", t, ": ", src.to_string(),
                            " -> ", dst.to_string()));
        const SimulationReport report = simulate(plan);
        const TrafficTotals traffic = totals(plan);
        ASSERT_EQ(traffic.received_bytes_sum, whole.received_bytes_sum);
        ASSERT_EQ(traffic.received_bytes_sum, report.received_bytes_sum);
        ASSERT_EQ(traffic.received_bytes_max, whole.received_bytes_max);
        int64_t peak = 0;
        for (const auto& [rank, bytes] : report.peak_bytes) {
          peak = std::max(peak, bytes);
          ASSERT_EQ(bytes, compile(plan, rank).peak_bytes());
        }
        ASSERT_EQ(worst_peak_bytes(plan).bytes, peak);
        ASSERT_EQ(to_bytes(from_bytes(to_bytes(plan))), to_bytes(plan));
        ++moved;
        with_several_steps += traffic.steps > count;
      }
    }
  }
  EXPECT_GT(moved, 150);
  EXPECT_GT(with_several_steps, 40);
}

// Sums on the source's mesh, and zeros on the destination's, are steps like others.
TEST(InSegments, MayReduceBeforeAndFillAfter) {
  const Layout src = test::layout_of(test::mesh_of({2, 2}), {16, 8}, "P,S(0)");
  const Layout dst = test::layout_of(test::mesh_of({4}, ranks_from(4, 4)), {16, 8}, "P");
  for (const Lowering& lowering : {Lowering::kGloo, Lowering::kNccl}) {
    Plan plan = make_plan(src, dst, {.lowering = lowering});
    ASSERT_GE(plan.steps.size(), 3u);
    plan.segments = {1, 4};
    ASSERT_TRUE(may_go_in(plan, plan.segments));
    simulate(plan);
  }
}

// While stripes cross, those that have arrived are gathered. The busiest rank's bytes count once, and of what the first
// and the last segment take alone, a segment's share.
TEST(InSegments, TakeLittleMoreThanTheBusiestRank) {
  const Layout src = test::layout_of(test::mesh_of({16}), {128, 1536, 4096}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({8, 8}, ranks_from(16, 64)), {128, 1536, 4096}, "R,S(1)");
  Topology topology = with_nodes(8);
  topology.step_ps = topology.inside.message_ps = topology.between.message_ps = topology.memory_ps_per_kib = 0;
  const Plan plan = make_plan(src, dst, {.topology = topology});
  ASSERT_GT(plan.segments.count, 8);
  const CrossingBound bound = crossing_bound(src, dst, 8);
  const int64_t busiest = std::max(bound.received_bytes_max, bound.forwarded_sent_bytes_max);
  const auto depth = static_cast<double>(plan.steps.size());
  EXPECT_LE(totals(plan).sent_bytes_max, busiest);
  EXPECT_EQ(totals(plan).received_bytes_max, busiest);
  EXPECT_LE(static_cast<double>(predicted_picoseconds(plan)),
            (1 + depth / static_cast<double>(plan.segments.count)) *
                static_cast<double>(scaled(busiest, topology.between.ps_per_kib)));
  // Chosen where it is faster.
  Plan whole = plan;
  whole.segments = {};
  EXPECT_LT(predicted_picoseconds(plan), predicted_picoseconds(whole));
}

// Temporaries are those of the segments under way, so more segments take less.
TEST(InSegments, TakeTheMemoryOfThoseUnderWay) {
  const Layout src = test::layout_of(test::mesh_of({2}), {64, 64}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({4}, ranks_from(2, 4)), {64, 64}, "R");
  const Layout stripes = test::layout_of(test::mesh_of({4}, ranks_from(2, 4)), {64, 64}, "S(0)");
  Plan plan = plan_through({src, stripes, dst}, {});
  const int64_t result = dst.largest_part_bytes();
  int64_t previous = std::numeric_limits<int64_t>::max();
  for (const int64_t count : {4, 8, 16}) {
    plan.segments = {1, count};
    const int64_t temporaries = worst_peak_bytes(plan).bytes - result;
    EXPECT_LT(temporaries, previous);
    EXPECT_LE(temporaries, 4 * result / count);
    previous = temporaries;
  }
}

// With a limit below what segments take, the plan goes without.
TEST(InSegments, KeepToTheMemoryLimit) {
  const Layout src = test::layout_of(test::mesh_of({16}), {128, 1536, 64}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({8, 8}, ranks_from(16, 64)), {128, 1536, 64}, "R,S(1)");
  const PlanOptions options{.topology = with_nodes(8)};
  for (const int64_t limit : {dst.largest_part_bytes() * 9 / 8, dst.largest_part_bytes() * 3}) {
    const Plan plan = make_plan_within(src, dst, options, limit);
    EXPECT_LE(peak_bytes(plan), limit);
  }
}

TEST(InSegments, AreRefusedWhereTheyCannotBe) {
  const Layout src = test::layout_of(test::mesh_of({4}), {16, 6}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({2}, {4, 5}), {16, 6}, "S(0)");
  Plan plan = plan_through({src, dst}, {});
  for (const Segments& segments : {Segments{0, 8}, Segments{1, 4}, Segments{0, 3}}) {
    plan.segments = segments;
    EXPECT_THROW(from_bytes(to_bytes(plan)), UserError) << segments.tensor_dim << " " << segments.count;
  }
  Plan on_one = make_plan(src, test::layout_of(test::mesh_of({4}), {16, 6}, "S(1)"), {});
  on_one.segments = {0, 2};
  EXPECT_THROW(from_bytes(to_bytes(on_one)), UserError);
}

}  // namespace
}  // namespace shardwright
