// Planning contexts: equality, and the source of a plan's topology.
#include "planning/context.h"

#include <gtest/gtest.h>

#include "layouts.h"
#include "planning/plan_cache.h"
#include "search/make_plan.h"
#include "support/error.h"

namespace shardwright {
namespace {

CertifiedPlanPtr certified(Plan plan) { return std::make_shared<const CertifiedPlan>(std::move(plan)); }

TEST(PlanningContext, ComparesByValue) {
  const ContextPtr a = PlanningContext::make({});
  const ContextPtr b = PlanningContext::make({.topology = Topology::named("64x8")});  // the default, given explicitly
  EXPECT_TRUE(*a == *b);
  EXPECT_EQ(a->hash(), b->hash());
  EXPECT_EQ(a->topology().name, "64x8");
  EXPECT_EQ(PlanningContext::make({.lowering = Lowering::kGloo})->topology().name, "gloo-local");
  EXPECT_FALSE(*a == *PlanningContext::make({}, 1 << 20));
  EXPECT_FALSE(*a == *PlanningContext::make({.lowering = Lowering::kGloo, .topology = Topology::named("64x8")}));
  EXPECT_THROW(PlanningContext::make({}, -1), UserError);
  Topology broken = Topology::named("64x8");
  broken.step_ps = -1;
  EXPECT_THROW(PlanningContext::make({.topology = broken}), UserError);
}

TEST(Pins, AreEqualIfTheirPlansAre) {
  const MeshPtr mesh = test::mesh_of({2, 2});
  const auto layout = [&](const char* placements) { return test::layout_of(mesh, {8, 8}, placements); };
  const CertifiedPlanPtr one = certified(make_plan(layout("S(0),R"), layout("R,R")));
  const CertifiedPlanPtr same = certified(make_plan(layout("S(0),R"), layout("R,R")));
  const CertifiedPlanPtr two = certified(make_plan(layout("S(1),R"), layout("R,R")));
  const PinsPtr a = Pins().with(one)->with(two);
  const PinsPtr b = Pins().with(two)->with(same);
  EXPECT_TRUE(*a == *b);
  EXPECT_EQ(a->hash(), b->hash());
  EXPECT_FALSE(*a == *a->without(two->plan()));
  EXPECT_TRUE(*a->without(two->plan()) == *Pins().with(one));
  EXPECT_EQ(a->without(two->plan())->hash(), Pins().with(one)->hash());
  EXPECT_EQ(a->without(one->plan())->without(two->plan())->hash(), Pins().hash());
  EXPECT_THROW(Pins().without(one->plan()), UserError);

  // A later plan for the same pair replaces the first.
  PlanOptions options{.topology = Topology::named("8xNVLink")};
  const CertifiedPlanPtr other = certified(make_plan(layout("S(0),R"), layout("R,R"), options));
  EXPECT_EQ(a->with(other)->size(), 2u);
  EXPECT_EQ(a->with(other)->find(layout("S(0),R"), layout("R,R"), Lowering::kNccl), other);
  EXPECT_FALSE(*a == *a->with(other));
  EXPECT_TRUE(*a == *a->with(other)->with(same));

  const ContextPtr bare = PlanningContext::make({});
  const ContextPtr pinned = PlanningContext::make({}, std::nullopt, a);
  EXPECT_FALSE(*bare == *pinned);
  EXPECT_TRUE(*pinned == *PlanningContext::make({}, std::nullopt, b));
  EXPECT_TRUE(*bare == *pinned->without_pins());
  EXPECT_EQ(bare->hash(), pinned->without_pins()->hash());
  EXPECT_TRUE(*bare == *PlanningContext::make({}, std::nullopt, std::make_shared<Pins>()));
}

TEST(PlanningContext, FindsTheTopologyOfTwoLayouts) {
  const auto named = [](const char* name) {
    Topology topology = Topology::named("64x8");
    topology.name = name;
    return topology;
  };
  const auto on_mesh = [&](const char* topology) {
    const auto shared = topology == nullptr ? nullptr : std::make_shared<const Topology>(named(topology));
    const auto mesh =
        std::make_shared<Mesh>(std::vector<std::string>{"a"}, std::vector<int64_t>{4}, std::vector<int64_t>{}, shared);
    return test::layout_of(mesh, {8}, "S(0)");
  };
  PlanningTables tables;
  const auto found = [&](const Layout& src, const Layout& dst, std::optional<Topology> asked = std::nullopt) {
    return topology_between(src, dst, Lowering::kGloo, asked, tables).name;
  };
  const Layout plain = on_mesh(nullptr), here = on_mesh("here"), there = on_mesh("there");
  EXPECT_EQ(found(plain, plain), "gloo-local");
  tables.environment = named("environment");
  EXPECT_EQ(found(plain, plain), "environment");
  tables.topologies["nccl"] = named("of nccl");
  EXPECT_EQ(found(plain, plain), "environment");
  tables.topologies["gloo"] = named("measured");
  EXPECT_EQ(found(plain, plain), "measured");
  EXPECT_EQ(found(plain, there), "there");
  EXPECT_EQ(found(here, there), "here");
  EXPECT_EQ(found(here, there, named("asked")), "asked");

  // The elements are the same, but the links between the ranks are not.
  EXPECT_TRUE(here == there);
  EXPECT_FALSE(same_topology(here.mesh(), there.mesh()));
  EXPECT_FALSE(same_topology(here.mesh(), plain.mesh()));
  EXPECT_TRUE(same_topology(here.mesh(), on_mesh("here").mesh()));
}

TEST(PlanningTables, CompareByValueAndHaveASummary) {
  PlanningTables a, b;
  EXPECT_EQ(a, b);
  EXPECT_EQ(a.hash(), b.hash());
  a.gemm_models[{"cpu", "float32"}] = GemmModel::named("cpu");
  EXPECT_NE(a, b);
  EXPECT_NE(a.hash(), b.hash());
  b.gemm_models[{"cpu", "float32"}] = GemmModel::named("cpu");
  EXPECT_EQ(a, b);
  EXPECT_EQ(a.summary(), b.summary());
  b.gemm_models[{"cpu", "float32"}].flops_per_us += 1;
  EXPECT_NE(a, b);
  EXPECT_NE(a.summary(), b.summary());
  b = a;
  b.topologies["gloo"] = Topology::named("gloo-local");
  EXPECT_NE(a.summary(), b.summary());
  b = a;
  b.environment = Topology::named("64x8");
  EXPECT_NE(a, b);
  EXPECT_NE(a.summary(), b.summary());
  b = a;
  b.pins = std::make_shared<Pins>();  // an empty set of pins equals no pins
  EXPECT_EQ(a, b);
  EXPECT_EQ(a.hash(), b.hash());
  const MeshPtr mesh = test::mesh_of({2});
  b.pins = b.pins->with(certified(make_plan(test::layout_of(mesh, {8}, "S(0)"), test::layout_of(mesh, {8}, "R"))));
  EXPECT_NE(a, b);
  EXPECT_NE(a.summary(), b.summary());
}

}  // namespace
}  // namespace shardwright
