#include <gtest/gtest.h>

#include "layout/error.h"
#include "layouts.h"
#include "planner/plan.h"
#include "simulate/simulate.h"

namespace shardwright {
namespace {

using test::layout_of;
using test::mesh_of;

std::vector<std::string> ops(const Plan& plan) {
  std::vector<std::string> names;
  for (const Step& step : plan.steps) names.emplace_back(step_op_name(step.op));
  return names;
}

Plan plan_of(const std::vector<int64_t>& mesh_sizes, const std::vector<int64_t>& shape, const std::string& src,
             const std::string& dst, Backend backend = Backend::kNccl) {
  const MeshPtr mesh = mesh_of(mesh_sizes);
  return make_plan(layout_of(mesh, shape, src), layout_of(mesh, shape, dst), {backend});
}

using Names = std::vector<std::string>;

TEST(Planner, NamesTheNativeCollective) {
  EXPECT_EQ(ops(plan_of({4}, {64, 64}, "S(0)", "R")), Names{"all_gather"});
  EXPECT_EQ(ops(plan_of({4}, {64, 64}, "S(0)", "S(1)")), Names{"all_to_all"});
  EXPECT_EQ(ops(plan_of({4}, {64, 64}, "R", "S(1)")), Names{"slice"});
  EXPECT_EQ(ops(plan_of({4}, {64, 64}, "P", "S(1)")), Names{"reduce_scatter"});
  EXPECT_EQ(ops(plan_of({4}, {64, 64}, "R", "P")), Names{"partition"});
  EXPECT_EQ(ops(plan_of({4}, {64, 64}, "S(0)", "P")), Names{"zero_fill"});
  EXPECT_EQ(ops(plan_of({4}, {64, 64}, "R", "P(max)")), Names{}) << "the same values stand for it";
  EXPECT_EQ(ops(plan_of({4}, {64, 64}, "S(0)", "S(0)")), Names{});
}

TEST(Planner, OneCollectiveOverAllMeshDimsThatChange) {
  EXPECT_EQ(ops(plan_of({2, 2, 2}, {64, 64}, "S(0),R,S(0)", "R,R,R")), Names{"all_gather"});
  EXPECT_EQ(ops(plan_of({2, 2, 2}, {64, 64}, "S(0),S(0),S(0)", "S(1),S(1),S(1)")), Names{"all_to_all"});
  EXPECT_EQ(ops(plan_of({2, 2, 2}, {64, 64}, "P,S(0),P", "S(1),S(0),S(1)")), Names{"reduce_scatter"});
  const Plan inner = plan_of({2, 2, 2}, {64, 64}, "S(0),S(1),S(0)", "S(0),S(1),R");
  ASSERT_EQ(ops(inner), Names{"all_gather"});
  EXPECT_EQ(inner.steps[0].mesh_dims, MeshDimSet::single(2));
}

TEST(Planner, SwappedOrdersArePermutations) {
  const MeshPtr mesh = mesh_of({2, 2});
  const Plan plan =
      make_plan(layout_of(mesh, {64, 64}, "S(0),S(0)"), layout_of(mesh, {64, 64}, "S(0),S(0)", {{0, {1, 0}}}));
  EXPECT_EQ(ops(plan), Names{"permute"});
}

TEST(Planner, ReducesOnceThenShares) {
  const Plan plan = plan_of({2, 2, 2}, {1024, 1024}, "P,P,P", "R,S(0),R");
  EXPECT_EQ(ops(plan), (Names{"reduce_scatter", "all_gather"}));
  EXPECT_EQ(plan.steps[0].mesh_dims.count(), 3);
  EXPECT_EQ(ops(plan_of({2, 2}, {1024, 1024}, "P(sum),P(avg)", "R,R")), Names{"all_reduce"});
}

TEST(Planner, UnevenGatherOverMergedDimsIsRight) {
  // PyTorch loses a row here.
  const Plan plan = plan_of({2, 2}, {5, 3}, "S(0),S(0)", "R,R");
  EXPECT_EQ(ops(plan), Names{"all_gather"});
  EXPECT_EQ(simulate(plan).received_bytes_sum, (4 * 5 - 5) * 3 * 4) << "no padding travels";
}

TEST(Planner, MovesOfDataAreByteOptimal) {
  const MeshPtr mesh = mesh_of({2, 2, 2});
  for (const auto& shape : std::vector<std::vector<int64_t>>{{64, 64}, {7, 5}}) {
    const std::vector<Layout> layouts = test::all_layouts(mesh, shape, {});
    for (const Layout& src : layouts) {
      for (const Layout& dst : layouts) {
        const Plan plan = make_plan(src, dst, {Backend::kNccl, Objective::kBytes});
        ASSERT_LE(plan.steps.size(), 1u);
        const Bound bound = lower_bound(src, dst);
        const TrafficTotals t = totals(plan);
        ASSERT_EQ(t.received_bytes_sum, bound.bytes_sum) << plan.to_string();
        ASSERT_EQ(t.received_bytes_max, bound.bytes_max) << plan.to_string();
      }
    }
  }
}

TEST(Planner, MeshDimsOfSizeOneChangeNothing) {
  EXPECT_TRUE(plan_of({1, 2}, {6, 6}, "S(0),S(1)", "R,S(1)").steps.empty());
  EXPECT_TRUE(plan_of({1, 2}, {6, 6}, "P,S(1)", "S(0),S(1)").steps.empty());
  EXPECT_TRUE(plan_of({1}, {6, 6}, "R", "P").steps.empty());
}

TEST(Planner, RefusesWhatPyTorchDoesNotDefine) {
  EXPECT_THROW(plan_of({2}, {4}, "P(sum)", "P(max)"), UserError);
  EXPECT_THROW(plan_of({2}, {4}, "S(0)", "P(max)"), UserError);
  EXPECT_THROW(plan_of({2}, {4}, "R", "P(product)"), UserError);
  const Layout a = layout_of(mesh_of({2}), {4}, "R");
  EXPECT_THROW(make_plan(a, layout_of(mesh_of({3}), {4}, "R")), UserError);
  EXPECT_THROW(make_plan(a, layout_of(mesh_of({2}), {5}, "R")), UserError);
  EXPECT_THROW(make_plan(a, layout_of(mesh_of({2}), {4}, "R", {}, "int32")), UserError);
}

}  // namespace
}  // namespace shardwright
