// Plans under a memory limit are correct on every rank and within the limit. They are refused only below the limit that
// the error names.
#include "planning/memory_limit.h"

#include <gtest/gtest.h>

#include "layouts.h"
#include "moves/describe.h"
#include "moves/traffic.h"
#include "planning/serialize.h"
#include "search/make_plan.h"
#include "simulate/simulate.h"
#include "support/error.h"

namespace shardwright {
namespace {

struct Setting {
  std::vector<int64_t> mesh;
  std::vector<int64_t> shape;
  size_t stride;
};

const std::vector<Setting> kSettings{
    {{2, 2}, {16, 16}, 3}, {{2, 4}, {16, 24}, 5}, {{2, 2}, {7, 5}, 3}, {{2, 2, 2}, {16, 8}, 1201}, {{3}, {9, 4}, 1}};

int64_t least_limit(const std::string& message) {
  const std::string before = "at least ";
  return std::stoll(message.substr(message.find(before) + before.size()));
}

class Fit : public testing::TestWithParam<Lowering> {};

TEST_P(Fit, KeepsToTheLimitOrReportsTheRequiredOne) {
  int64_t kept = 0;
  int64_t refused = 0;
  int64_t in_rounds = 0;
  for (const Setting& setting : kSettings) {
    const MeshPtr mesh = test::mesh_of(setting.mesh);
    const std::vector<Layout> all = test::all_layouts(mesh, setting.shape, {Placement::partial(ReduceOp::kSum)});
    for (size_t pair = 0; pair < all.size() * all.size(); pair += setting.stride) {
      const Layout& src = all[pair / all.size()];
      const Layout& dst = all[pair % all.size()];
      if (!dst.partial_dims().empty()) continue;
      PlanOptions options;
      options.lowering = GetParam();
      const int64_t free_peak = peak_bytes(make_plan(src, dst, options));
      for (const int64_t limit : {free_peak, free_peak * 3 / 4, free_peak / 2, int64_t{0}}) {
        try {
          const Plan plan = make_plan_within(src, dst, options, limit);
          const SimulationReport report = simulate(from_bytes(to_bytes(plan)));
          for (const auto& [rank, peak] : report.peak_bytes) ASSERT_LE(peak, limit) << to_string(plan);
          ++kept;
          for (const Step& step : plan.steps) in_rounds += step.rounds > 1;
        } catch (const UserError& error) {
          ++refused;
          const int64_t least = least_limit(error.what());
          ASSERT_GT(least, limit) << error.what();
          ASSERT_LE(peak_bytes(make_plan_within(src, dst, options, least)), least) << error.what();
        }
      }
    }
  }
  std::printf("%lld plans within their limit, %lld steps in rounds; %lld limits refused\n",
              static_cast<long long>(kept), static_cast<long long>(in_rounds), static_cast<long long>(refused));
  EXPECT_GT(in_rounds, 100);
  EXPECT_GT(refused, 100);
}

// Parts of several runs are packed once per receiver, and shares of small tensors are rounded up.
TEST_P(Fit, KeepsToTheLimitWithManyPackedParts) {
  const MeshPtr mesh = test::mesh_of({8});
  for (const int64_t n : {1, 13, 1000}) {
    const std::vector<std::string> all{"P",
                                       "S(0)",
                                       "Cyclic(0,10)",
                                       "SS(0,4)",
                                       "Blocks(0,7)",
                                       "S(1)",
                                       "Cyclic(1,1)",
                                       concat("Packed(0,", n - n / 3, ":", n / 3, ")"),
                                       concat("Ragged(0,0:", n, ":0:0:0:0:0:0)")};
    for (const std::string& from : all) {
      for (const char* to : {"R", "S(0)"}) {
        const Layout src = test::layout_of(mesh, {n, 4}, from);
        const Layout dst = test::layout_of(mesh, {n, 4}, to);
        const PlanOptions options{.lowering = GetParam()};
        const int64_t free_peak = peak_bytes(make_plan(src, dst, options));
        for (const int64_t limit : {std::max<int64_t>(free_peak - 1, 0), free_peak * 3 / 4, free_peak / 2}) {
          try {
            const Plan plan = make_plan_within(src, dst, options, limit);
            for (const auto& [rank, peak] : simulate(plan).peak_bytes) ASSERT_LE(peak, limit) << to_string(plan);
          } catch (const UserError& error) {
            ASSERT_GT(least_limit(error.what()), limit) << error.what();
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Program, Fit, testing::Values(Lowering::kNccl, Lowering::kGloo),
                         [](const auto& info) { return std::string(info.param.name); });

// Going from cut rows to cut columns packs all that is sent and received, which takes as much memory again as source
// and destination.
TEST(Fit, RoundsShrinkStaging) {
  const MeshPtr mesh = test::mesh_of({4});
  const Layout src = test::layout_of(mesh, {64, 64}, "S(0)");
  const Layout dst = test::layout_of(mesh, {64, 64}, "S(1)");
  const int64_t part = 64 * 64 * 4 / 4;
  const Plan free = make_plan(src, dst);
  EXPECT_GT(peak_bytes(free), part + part / 2);
  const Plan plan = make_plan_within(src, dst, {}, part + part / 4);
  ASSERT_EQ(plan.steps.size(), 1u);
  EXPECT_GT(plan.steps[0].rounds, 1);
  EXPECT_EQ(totals(plan).received_bytes_max, totals(free).received_bytes_max);
  EXPECT_EQ(totals(plan).steps, plan.steps[0].rounds);
  EXPECT_EQ(totals(plan).messages_max, 3 * plan.steps[0].rounds);
  simulate(plan);
}

// In a composed all-reduce, the second step of each round sends the results of the first.
TEST(Fit, ReductionsAreSplitIntoRoundsToo) {
  for (const int64_t ranks : {2, 4}) {
    for (const char* pending : {"P(sum)", "P(avg)", "P(norm 2)"}) {
      const MeshPtr mesh = test::mesh_of({ranks});
      const Layout src = test::layout_of(mesh, {63, 7}, pending);
      const Layout dst = test::layout_of(mesh, {63, 7}, "R");
      PlanOptions options;
      options.lowering = Lowering::kGloo;
      const Plan free = make_plan(src, dst, options);
      const int64_t result = 63 * 7 * 4;
      const int64_t limit = result + (peak_bytes(free) - result) / 3;
      const Plan plan = make_plan_within(src, dst, options, limit);
      EXPECT_LE(peak_bytes(plan), limit);
      ASSERT_EQ(plan.steps.size(), 1u);
      EXPECT_EQ(plan.steps[0].op, StepOp::kAllReduce);
      EXPECT_GT(plan.steps[0].rounds, 1);
      simulate(plan);
      options.lowering = Lowering::kNccl;  // in place under any limit
      EXPECT_EQ(peak_bytes(make_plan_within(src, dst, options, result)), result);
    }
  }
}

// Plans in segments need more memory here. Without segments, other steps are the fastest.
TEST(Fit, ChoosesTheStepsThatAreFastestWithoutSegments) {
  const Layout src = test::layout_of(test::mesh_of({1}), {8192, 8192}, "R");
  const Layout dst = test::layout_of(test::mesh_of({8}), {8192, 8192}, "R");
  const Plan fastest = make_plan(src, dst);
  ASSERT_GT(fastest.segments.count, 1);
  const Plan plan = make_plan_within(src, dst, {}, peak_bytes(fastest) - 1);
  EXPECT_EQ(to_string(plan), to_string(make_plan(src, dst, {.segments = false})));
}

// Temporaries of a large tensor take at most as much as the larger of source and destination, plus some staging.
TEST(Fit, LimitsTemporariesByDefault) {
  const MeshPtr mesh = test::mesh_of({4});
  const Layout src = test::layout_of(mesh, {64, 8192, 8192}, "S(1)");
  const Layout dst = test::layout_of(mesh, {64, 8192, 8192}, "S(2)");
  const int64_t part = int64_t{64} * 8192 * 8192 * 4 / 4;
  EXPECT_GT(peak_bytes(make_plan(src, dst)), 2 * part + kStagingBytes);
  EXPECT_LE(peak_bytes(make_plan_within(src, dst, {}, std::nullopt)), 2 * part + kStagingBytes);
}

}  // namespace
}  // namespace shardwright
