// The plan cache: its key has everything that plans depend on, and its size is bounded.
#include "planning/plan_cache.h"

#include <gtest/gtest.h>

#include "layouts.h"
#include "moves/describe.h"
#include "planning/serialize.h"
#include "search/make_plan.h"

namespace shardwright {
namespace {

TEST(PlanCache, EvictsTheLeastRecentlyUsedPlan) {
  const MeshPtr mesh = test::mesh_of({2, 2});
  const ContextPtr context = PlanningContext::make({});
  const auto request = [&](const std::string& src) {
    return PlanRequest{test::layout_of(mesh, {8, 8}, src), test::layout_of(mesh, {8, 8}, "R,R"), context};
  };
  PlanCache cache(2);
  const CertifiedPlanPtr first = cache.get(request("S(0),R"));
  EXPECT_EQ(cache.get(request("S(0),R")), first);
  cache.get(request("S(1),R"));
  EXPECT_EQ(cache.get(request("S(0),R")), first);  // now the most recently used
  cache.get(request("R,S(0)"));                    // evicts S(1),R
  EXPECT_EQ(cache.get(request("S(0),R")), first);
  EXPECT_EQ(cache.counts().hits, 3);
  EXPECT_EQ(cache.counts().misses, 3);
  EXPECT_EQ(cache.counts().size, 2);
  cache.get(request("S(1),R"));
  EXPECT_EQ(cache.counts().misses, 4);
}

TEST(PlanCache, KeyHasEverythingThatPlansDependOn) {
  const MeshPtr mesh = test::mesh_of({2, 2});
  Layout src = test::layout_of(mesh, {8, 8}, "S(0),R");
  const Layout dst = test::layout_of(mesh, {8, 8}, "R,S(1)");
  PlanOptions options;
  std::optional<int64_t> limit;
  PlanCache cache;
  int64_t distinct = 0;
  const auto ask = [&] {
    for (int times = 0; times < 2; ++times) cache.get({src, dst, PlanningContext::make(options, limit)});
    ++distinct;
    EXPECT_EQ(cache.counts().misses, distinct);
    EXPECT_EQ(cache.counts().hits, distinct);
  };
  ask();
  options.lowering = Lowering::kGloo;
  ask();
  options.objective = Objective::kBytes;
  ask();
  options.topology = Topology::named("8xNVLink");
  ask();
  options.topology->mesh_dims["a"] = {1, 1};
  ask();
  options.ordered = true;
  ask();
  options.groups = {MeshDimSet::from_bits(1), MeshDimSet::from_bits(2), MeshDimSet::from_bits(3)};
  ask();
  options.max_held = 64;
  ask();
  limit = 1 << 20;
  ask();
  src = test::layout_of(mesh, {8, 8}, "R,S(0)");
  ask();
}

TEST(PlanCache, ReturnsPinnedPlansAndKeepsOthers) {
  const MeshPtr mesh = test::mesh_of({2, 2});
  const Layout src = test::layout_of(mesh, {8, 8}, "S(0),S(0)");
  const Layout dst = test::layout_of(mesh, {8, 8}, "R,R");
  const Layout other = test::layout_of(mesh, {8, 8}, "S(1),R");
  const auto pinned = std::make_shared<const CertifiedPlan>(
      plan_through({src, test::layout_of(mesh, {8, 8}, "S(0),R"), dst}, {Lowering::kGloo}));
  const PinsPtr pins = Pins().with(pinned);
  const ContextPtr bare = PlanningContext::make({Lowering::kGloo});
  const ContextPtr with_pins = PlanningContext::make({Lowering::kGloo}, std::nullopt, pins);

  PlanCache cache;
  const CertifiedPlanPtr searched = cache.get({src, dst, bare});
  const CertifiedPlanPtr unpinned = cache.get({src, other, bare});
  EXPECT_EQ(searched->plan().steps.size(), 1u);
  EXPECT_EQ(cache.get({src, dst, with_pins}), pinned);
  EXPECT_EQ(cache.get({src, other, with_pins}), unpinned);
  EXPECT_EQ(cache.get({src, dst, bare}), searched);
  // Another lowering is another key.
  const ContextPtr nccl = PlanningContext::make({Lowering::kNccl}, std::nullopt, pins);
  EXPECT_NE(cache.get({src, dst, nccl}), pinned);
}

TEST(PlanCache, StaysBoundedOverManyLayouts) {
  PlanCache cache(64);
  const MeshPtr mesh = test::mesh_of({2});
  const ContextPtr context = PlanningContext::make({});
  for (int64_t n = 1; n <= 1000; ++n) {
    cache.get({test::layout_of(mesh, {n}, "S(0)"), test::layout_of(mesh, {n}, "R"), context});
    EXPECT_EQ(cache.counts().size, std::min<int64_t>(n, 64));
  }
}

}  // namespace
}  // namespace shardwright
