#include <gtest/gtest.h>

#include <map>
#include <set>

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

// The least that the worst rank can send: holders of an element can share what is sent of it, and ranks either hold all
// the same or nothing in common. Counted element by element.
int64_t least_worst_sent(const Layout& src, const Layout& dst) {
  const int64_t ranks = src.mesh().size();
  const auto owners = [&](const Layout& layout) {
    std::vector<std::set<int64_t>> by_element(static_cast<size_t>(layout.num_elements()));
    for (int64_t p = 0; p < ranks; ++p) {
      const Region region = layout.region(p);
      for (const Interval& rows : region[0]) {
        for (int64_t i = rows.begin; i < rows.end; ++i) {
          for (const Interval& columns : region[1]) {
            for (int64_t j = columns.begin; j < columns.end; ++j) by_element[i * layout.shape()[1] + j].insert(p);
          }
        }
      }
    }
    return by_element;
  };
  const auto holders = owners(src);
  const auto receivers = owners(dst);
  std::map<std::set<int64_t>, int64_t> sent;  // by those who hold it
  for (size_t e = 0; e < holders.size(); ++e) {
    for (const int64_t p : receivers[e]) sent[holders[e]] += holders[e].count(p) == 0 ? 1 : 0;
  }
  int64_t worst = 0;
  for (const auto& [sharing, elements] : sent) {
    const auto k = static_cast<int64_t>(sharing.size());
    worst = std::max(worst, (elements + k - 1) / k);
  }
  return worst * src.dtype().size_bytes();
}

struct ByteCase {
  std::vector<int64_t> mesh;
  std::vector<int64_t> shape;
};

class FewestBytes : public testing::TestWithParam<ByteCase> {};

TEST_P(FewestBytes, MeetTheBoundInAllAndBalanceWhatIsSent) {
  const MeshPtr mesh = mesh_of(GetParam().mesh);
  const std::vector<Layout> layouts = test::all_layouts(mesh, GetParam().shape, {});
  int64_t moving = 0;
  int64_t spread = 0;
  for (const Layout& src : layouts) {
    for (const Layout& dst : layouts) {
      const Plan plan = make_plan(src, dst, {Backend::kNccl, Objective::kBytes});
      const Bound bound = lower_bound(src, dst);
      const TrafficTotals t = totals(plan);
      ASSERT_LE(plan.steps.size(), 2u);
      ASSERT_EQ(t.received_bytes_sum, bound.bytes_sum) << plan.to_string();
      ASSERT_EQ(t.received_bytes_max, bound.bytes_max) << plan.to_string();
      ASSERT_LE(t.sent_bytes_max * 100, least_worst_sent(src, dst) * 105) << plan.to_string();
      moving += bound.bytes_sum > 0;
      if (!plan.steps.empty() && plan.steps.back().spread) {
        ++spread;
        ASSERT_NO_THROW(simulate(plan)) << plan.to_string();
        ASSERT_NO_THROW(simulate(make_plan(src, dst, {Backend::kGloo, Objective::kBytes}))) << plan.to_string();
      }
    }
  }
  std::printf("%lld pairs move data, replicas share the sending in %lld\n", static_cast<long long>(moving),
              static_cast<long long>(spread));
}

INSTANTIATE_TEST_SUITE_P(Planner, FewestBytes,
                         testing::Values(ByteCase{{2, 4}, {16, 16}}, ByteCase{{2, 2, 2}, {16, 16}},
                                         ByteCase{{2, 4}, {7, 5}}, ByteCase{{2, 2, 2}, {7, 5}},
                                         ByteCase{{3, 2}, {12, 12}}, ByteCase{{3, 2}, {7, 5}},
                                         ByteCase{{2, 3, 2}, {12, 12}}, ByteCase{{2, 3, 2}, {7, 5}}));

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
