// Mesh dims that are split in several: the same parts under other names, and plans that forward data in several steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "exchange/bounds.h"
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
#include "search/split.h"
#include "simulate/simulate.h"
#include "support/error.h"
#include "two_mesh_plans.h"

namespace shardwright {
namespace {

using test::expect_as_predicted;
using test::layout_of;
using test::mesh_of;
using test::ranks_from;
using test::with_nodes;

TEST(Split, KeepsTheParts) {
  std::vector<int64_t> ranks = ranks_from(0, 24);
  std::reverse(ranks.begin() + 3, ranks.end());
  const MeshPtr mesh = mesh_of({2, 6, 2}, ranks);
  for (const auto& [placements, order] : std::vector<std::pair<const char*, ShardOrder>>{
           {"S(0),R,S(0)", {{0, {2, 0}}}}, {"SS(0,3),R,S(1)", {}}, {"R,R,R", {}}, {"S(1),R,P", {}}}) {
    const Layout whole = layout_of(mesh, {9, 5}, placements, order);
    const std::optional<Layout> fine = split(whole, 1, {3, 2});
    ASSERT_TRUE(fine.has_value());
    EXPECT_EQ(fine->mesh().to_string(), "a=2,b.0=3,b.1=2,c=2");
    EXPECT_EQ(to_ints(fine->mesh().ranks()), to_ints(mesh->ranks()));
    for (int64_t p = 0; p < mesh->size(); ++p) EXPECT_EQ(fine->region(p), whole.region(p)) << placements;
    EXPECT_EQ(joined(*fine, mesh), whole) << placements;
  }
}

TEST(Split, KeepsFlattenedDims) {
  const Layout src(mesh_of({2}), {512, 64, 64}, DType::parse("float32"), {Placement::parse("S(0)")}, {},
                   StridedMeaning::kAuto, 2);
  const Layout dst(mesh_of({16}, ranks_from(2, 16)), {512, 64, 64}, DType::parse("float32"), {Placement::replicate()},
                   {}, StridedMeaning::kAuto, 2);
  PlanOptions options;
  options.topology = with_nodes(8);
  const Plan plan = make_plan(src, dst, options);
  EXPECT_FALSE(mesh_reached(plan) == dst.mesh()) << to_string(plan);
  EXPECT_EQ(to_string(from_bytes(to_bytes(plan))), to_string(plan));
  EXPECT_EQ(joined(*split(dst, 0, {2, 8}), dst.mesh_ptr()), dst);
}

TEST(Split, IsJoinedOnlyIfNothingIsCut) {
  const Layout whole = layout_of(mesh_of({6}), {12}, "R");
  const Layout fine = *split(whole, 0, {3, 2});
  const Layout cut = fine.with({{{1, 1}}}, std::vector<Placement>(2, Placement::replicate()));
  EXPECT_FALSE(joined(cut, whole.mesh_ptr()).has_value());
  EXPECT_FALSE(joined(fine, mesh_of({6}, {1, 2, 3, 4, 5, 6})).has_value());
  EXPECT_FALSE(joined(fine, mesh_of({3})).has_value());
  EXPECT_FALSE(joined(fine, mesh_of({12})).has_value());
  EXPECT_THROW(split(layout_of(mesh_of({6}), {12}, "S(0)"), 0, {3, 2}), InvariantError);
}

TEST(Split, AlignsWithNodes) {
  using Ways = std::vector<std::vector<int64_t>>;
  EXPECT_EQ(ways_to_split(*mesh_of({16}), 0, 8), (Ways{{2, 8}, {4, 4}}));
  EXPECT_EQ(ways_to_split(*mesh_of({16}, ranks_from(4, 16)), 0, 8), (Ways{{4, 4}}));
  EXPECT_EQ(ways_to_split(*mesh_of({4, 2}), 0, 4), (Ways{{2, 2}}));
  EXPECT_EQ(ways_to_split(*mesh_of({2, 4}), 1, 4), (Ways{}));
  EXPECT_EQ(ways_to_split(*mesh_of({13}), 0, 0), (Ways{}));
  EXPECT_EQ(ways_to_split(*mesh_of({2048}), 0, 8), (Ways{{256, 8}, {16, 16, 8}, {64, 32}}));
}

TEST(Split, ForwardsDataInSeveralSteps) {
  for (const auto& [shape, from, count] : std::vector<std::tuple<std::vector<int64_t>, int64_t, int64_t>>{
           {{48, 40}, 1, 24}, {{7, 5}, 2, 24}, {{24, 3, 5}, 3, 27}, {{50}, 1, 16}}) {
    const Layout src = layout_of(mesh_of({from}), shape, "R");
    const Layout dst = layout_of(mesh_of({count}, ranks_from(8, count)), shape, "R");
    Topology slow_between = with_nodes(8);
    slow_between.between = {1000, 1'000'000'000};
    const Plan plan = make_plan(src, dst, {.topology = slow_between});
    expect_as_predicted(plan);
    EXPECT_FALSE(mesh_reached(plan) == dst.mesh()) << to_string(plan);
    EXPECT_NE(to_json(plan, certify(plan, peak_bytes(plan)), {}).find("\"reached_mesh\""), std::string::npos);
  }
}

// 8 MiB to 2,048 ranks on nodes of 8: few messages, no rank sends more than 4/3 of the tensor, and data of the crossing
// enters a node once.
TEST(Split, ReachesManyRanksInFewMessages) {
  const Layout src = layout_of(mesh_of({8}), {2048, 1024}, "R");
  const Layout dst = layout_of(mesh_of({2048}, ranks_from(8, 2048)), {2048, 1024}, "R");
  const Plan plan = make_plan(src, dst, {.topology = with_nodes(8)});
  const Certificate certificate = certify(plan, {0, false});
  ASSERT_TRUE(certificate.crossing.has_value());
  EXPECT_LE(certificate.traffic.messages_max, 60) << to_string(plan);
  EXPECT_LE(certificate.traffic.sent_messages_max, 60) << to_string(plan);
  const int64_t bound =
      std::max(certificate.crossing->received_bytes_max, certificate.crossing->forwarded_sent_bytes_max);
  EXPECT_LE(certificate.traffic.sent_bytes_max, bound + bound / 3) << to_string(plan);  // relays send their part again
  EXPECT_LE(certificate.traffic.received_bytes_max, bound + bound / 16) << to_string(plan);
  EXPECT_LT(certificate.predicted_ps, 7 * certificate.least_ps) << to_string(plan);
}

TEST(Split, SendsToEachNodeOnceIfThatPays) {
  const Layout src = layout_of(mesh_of({8}), {1024, 1024}, "S(0)");
  const Layout dst = layout_of(mesh_of({32}, ranks_from(8, 32)), {1024, 1024}, "R");
  const Plan plan = make_plan(src, dst, {.topology = with_nodes(8)});
  std::map<int64_t, int64_t> entering;
  for (const Rank rank : dst.mesh().ranks()) {
    for (const Step& step : plan.steps) {
      const Mesh& mesh = step.before.mesh();
      const bool leaves_nodes =
          step.op == StepOp::kCross ||
          with_nodes(8).slowest_link(mesh, step.mesh_dims).ps_per_kib == with_nodes(8).between.ps_per_kib;
      if (leaves_nodes) entering[to_int(rank) / 8] += traffic_at(step, plan.lowering, rank).received_bytes;
    }
  }
  for (const auto& [node, bytes] : entering) EXPECT_LE(bytes, 4 * 1024 * 1024) << to_string(plan);
}

// The source's mesh may be one into which the destination's mesh would be split.
TEST(Split, IsNotTheMeshOfTheSource) {
  const auto mesh = std::make_shared<Mesh>(std::vector<std::string>{"a.0", "a.1"}, std::vector<int64_t>{4, 4});
  const Layout src = layout_of(mesh, {13}, "S(0),S(0)");
  const Plan plan = make_plan(src, layout_of(mesh_of({16}), {13}, "R"), {Lowering::kGloo});
  EXPECT_EQ(to_string(from_bytes(to_bytes(plan))), to_string(plan));
}

TEST(Split, IsNotUsedForPartialDestinations) {
  const Layout src = layout_of(mesh_of({1}), {64, 64}, "R");
  for (const char* wanted : {"P", "P(avg)"}) {
    const Layout dst = layout_of(mesh_of({24}, ranks_from(8, 24)), {64, 64}, wanted);
    expect_as_predicted(make_plan(src, dst, {.topology = with_nodes(8)}));
  }
}

}  // namespace
}  // namespace shardwright
