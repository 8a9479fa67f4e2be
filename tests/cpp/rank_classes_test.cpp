// Compares the costs of the worst rank, found by classes of ranks, with those of every rank.
#include "moves/rank_classes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>

#include "layouts.h"
#include "moves/describe.h"
#include "moves/traffic.h"
#include "planning/memory_limit.h"
#include "rank_maxima.h"
#include "search/make_plan.h"
#include "support/error.h"

namespace shardwright {
namespace {

void check(const Plan& plan, bool compiles) {
  test::check_traffic(plan);
  test::check_peak(plan, compiles);
  const Bound bound = lower_bound(plan.src, plan.dst);
  if (!plan.src.partial_dims().empty() || !plan.dst.partial_dims().empty()) return;
  Bound all;
  for (int64_t p = 0; p < plan.src.mesh().size(); ++p) {
    const Region needed = plan.dst.region(p);
    const int64_t missing = (num_elements(needed) - shared_elements(plan.src.region(p), needed)) * 4;
    all.bytes_max = std::max(all.bytes_max, missing);
    all.bytes_sum += missing;
  }
  EXPECT_EQ(bound.bytes_max, all.bytes_max) << to_string(plan);
  EXPECT_EQ(bound.bytes_sum, all.bytes_sum) << to_string(plan);
}

TEST(RankClasses, RepresentEveryRankOnAllLayoutsOfSmallMeshes) {
  int64_t plans = 0;
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{2}, {3}, {2, 2}, {2, 3}, {2, 2, 2}}) {
    const size_t stride = sizes.size() == 3 ? 23 : 1;
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{8, 12}, {7, 5}, {0, 3}, {1, 9}}) {
      const MeshPtr mesh = test::mesh_of(sizes);
      const std::vector<Layout> all = test::all_layouts(mesh, shape, {Placement::partial(ReduceOp::kSum)});
      for (size_t pair = 0; pair < all.size() * all.size(); pair += stride) {
        PlanOptions options;
        options.lowering = pair % 2 == 0 ? Lowering::kNccl : Lowering::kGloo;
        ASSERT_NO_FATAL_FAILURE(check(make_plan(all[pair / all.size()], all[pair % all.size()], options), true));
        ASSERT_FALSE(HasFailure());
        ++plans;
      }
    }
  }
  EXPECT_GT(plans, 3000);
}

// Mesh dims are long enough to have inner ranks. Plans have orders, strided shards, shuffled ranks, rounds and shared
// sending.
TEST(RankClasses, RepresentEveryRankOfRandomPlans) {
  const uint64_t seed = 20261122;
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  const auto below = [&](size_t count) { return static_cast<int64_t>(random() % count); };
  const std::vector<int64_t> lengths{1, 5, 6, 8, 11, 12, 16, 24, 25, 32, 50, 60, 64, 97, 100, 144, 720};
  int64_t with_classes = 0;
  for (int made = 0; made < 1500;) {
    std::vector<int64_t> sizes(1 + below(3));
    int64_t ranks = 1;
    for (int64_t& size : sizes) ranks *= size = 1 + below(12);
    if (ranks > 150) continue;
    std::vector<int64_t> shuffled;
    const bool is_shuffled = below(6) == 0;
    for (int64_t rank = 0; is_shuffled && rank < ranks; ++rank) shuffled.push_back(rank);
    for (size_t i = shuffled.size(); i > 1; --i) std::swap(shuffled[i - 1], shuffled[below(i)]);
    const MeshPtr mesh = test::mesh_of(sizes, shuffled);
    std::vector<int64_t> shape(1 + below(3));
    for (int64_t& length : shape) length = lengths[below(lengths.size())];
    const auto layout = [&](bool with_sums) {
      std::vector<Placement> all;
      ShardOrder order;
      const bool is_strided = below(4) == 0;
      for (size_t d = 0; d < sizes.size(); ++d) {
        const int64_t t = below(shape.size() + (with_sums ? 2 : 1));
        if (t > static_cast<int64_t>(shape.size())) all.push_back(Placement::partial(ReduceOp::kSum));
        if (t == static_cast<int64_t>(shape.size())) all.push_back(Placement::replicate());
        if (t >= static_cast<int64_t>(shape.size())) continue;
        all.push_back(is_strided ? Placement::strided_shard(t, 1 + below(5)) : Placement::shard(t));
        order[t].insert(order[t].begin() + below(order[t].size() + 1), static_cast<int>(d));
      }
      if (is_strided || below(2) == 0) order.clear();
      return Layout(mesh, shape, DType::parse("float32"), all, order);
    };
    PlanOptions options;
    options.lowering = below(2) == 0 ? Lowering::kNccl : Lowering::kGloo;
    options.objective = below(4) == 0 ? Objective::kBytes : Objective::kTime;
    options.ordered = below(5) == 0;
    const Layout src = layout(below(2) == 0);
    const Layout dst = layout(false);
    Plan plan = make_plan(src, dst, options);
    if (src.partial_dims().empty() && below(2) == 0) plan = plan_through({src, dst}, options);
    check(plan, false);
    RankClasses classes(*mesh);
    classes.add(src, dst);
    with_classes += static_cast<int64_t>(classes.sample().positions.size()) < ranks;
    for (Step& step : plan.steps) {
      if (can_run_in_rounds(step, plan.lowering)) step.rounds = 1 + below(4);
    }
    test::check_traffic(plan);
    test::check_peak(plan, false);
    ASSERT_FALSE(HasFailure());
    ++made;
  }
  EXPECT_GT(with_classes, 500);
}

// If there are too many classes to examine, the result is marked as inexact.
TEST(RankClasses, ReportMaximaThatAreNotExact) {
  const MeshPtr mesh = test::mesh_of({32, 16, 16});
  const Layout src = test::layout_of(mesh, {10007, 3}, "S(0),S(0),S(0)");
  const Layout dst = test::layout_of(mesh, {10007, 3}, "S(0),S(0),S(0)", {{0, {2, 1, 0}}});
  const Plan plan = plan_through({src, dst});
  EXPECT_FALSE(totals(plan).maxima_are_exact);
  EXPECT_FALSE(max_peak_bytes(plan).is_exact);
  // With equal parts, digits give exact maxima of the same case.
  const Layout even_src = test::layout_of(mesh, {65536, 3}, "S(0),S(0),S(0)");
  const Layout even_dst = test::layout_of(mesh, {65536, 3}, "S(0),S(0),S(0)", {{0, {2, 1, 0}}});
  const Plan even = plan_through({even_src, even_dst});
  EXPECT_TRUE(totals(even).maxima_are_exact);
  EXPECT_TRUE(max_peak_bytes(even).is_exact);
}

// The corners in rank_classes.h rely on this invariant.
TEST(Layout, LargestPositionHoldsTheMost) {
  for (const int64_t n : {0, 1, 5, 7, 12, 30, 31}) {
    for (const char* placements : {"S(0),S(0)", "SS(0,3),S(0)", "S(0),SS(0,2)", "SS(0,5),SS(0,4)"}) {
      const MeshPtr mesh = test::mesh_of({3, 4});
      const Layout layout(mesh, {n, 2}, DType::parse("float32"), parse_placements(placements), {},
                          StridedMeaning::kLiteral);
      const int64_t most = num_elements(layout.region(layout.largest_position()));
      for (int64_t p = 0; p < mesh->size(); ++p) {
        EXPECT_LE(num_elements(layout.region(p)), most) << layout.to_string() << " at " << p;
      }
    }
  }
}

}  // namespace
}  // namespace shardwright
