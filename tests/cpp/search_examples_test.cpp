// The worked examples in the headers of csrc/cost, csrc/moves and csrc/search.
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cost/gemm_model.h"
#include "cost/link_fit.h"
#include "layouts.h"
#include "moves/collectives.h"
#include "moves/move.h"
#include "moves/move_table.h"
#include "moves/spans.h"
#include "moves/step_counts.h"
#include "moves/step_exchange.h"
#include "moves/traffic.h"
#include "search/balanced.h"
#include "search/choices.h"
#include "search/over_relays.h"
#include "search/relays.h"
#include "search/split.h"
#include "search/states.h"

namespace shardwright {
namespace {

constexpr int64_t kMicrosecond = 1'000'000;  // in picoseconds

// Returns the number of microseconds, rounded to a tenth.
double microseconds(int64_t picoseconds) { return static_cast<double>((picoseconds + 50'000) / 100'000) / 10; }

TEST(CostExamples, OneCollective) {
  StepCounts counts;
  counts.received_bytes = counts.touched_bytes = int64_t{8} << 20;
  counts.messages = 7;
  const Topology topology = Topology::named("64x8");
  EXPECT_EQ(microseconds(predicted_picoseconds(false, counts, topology.inside, topology)), 66.5);
}

TEST(CostExamples, LastWaveOfAProduct) {
  GemmModel model{"four processors", 4, 128, 128, 2 * 128 * 128};
  const auto tiles = [&](int64_t count) { return model.picoseconds(128 * count, 128, 100, 1, 2); };
  EXPECT_EQ(tiles(4), 100 * kMicrosecond);
  EXPECT_EQ(tiles(1), 325 * kMicrosecond / 10);
  EXPECT_EQ(tiles(5), tiles(4) + tiles(1));
}

TEST(CostExamples, FitOfALink) {
  const LinkFit fit =
      fit_link({{1, 1000, 111e-6}, {3, 1000, 131e-6}, {1, 1'000'000, 1110e-6}, {1, 2'000'000, 2110e-6}});
  EXPECT_NEAR(fit.step, 100e-6, 1e-12);
  EXPECT_NEAR(fit.message, 10e-6, 1e-12);
  EXPECT_NEAR(fit.byte, 1e-9, 1e-18);
}

TEST(MovesExamples, AllReduces) {
  EXPECT_EQ(all_reduce_traffic(10, 4, 2, 4, true), (Traffic{60, 60, 6, 6}));
  EXPECT_EQ(all_reduce_traffic(10, 4, 0, 4, false), (Traffic{64, 64, 6, 6}));
  EXPECT_EQ(all_reduce_traffic(10, 4, 3, 4, false), (Traffic{48, 48, 6, 6}));
}

TEST(MovesExamples, SpannedDims) {
  const MeshPtr mesh = test::mesh_of({2, 2});
  const std::vector<Cut> a_then_b{{0, 1}, {1, 1}};
  EXPECT_EQ(spanned_dims(*mesh, 8, a_then_b, {{0, 1}}), MeshDimSet::single(1));
  EXPECT_EQ(spanned_dims(*mesh, 8, a_then_b, {{1, 2}}), MeshDimSet::single(0));
  EXPECT_EQ(spanned_dims(*mesh, 8, {{0, 1}}, {{1, 1}}), MeshDimSet::from_bits(3));
}

TEST(MovesExamples, Corners) {
  const MeshPtr mesh = test::mesh_of({3, 2});
  const auto examined = [&](const std::vector<Cut>& cuts) {
    Corners corners(*mesh);
    corners.add(8, cuts);
    std::set<int64_t> positions;
    for (const Corner corner : corners.of(MeshDimSet::from_bits(3))) positions.insert(corners.position(corner));
    return positions;
  };
  EXPECT_EQ(examined({{0, 1}, {1, 1}}), (std::set<int64_t>{0, 1, 4, 5}));
  EXPECT_EQ(examined({{0, CutRule::ragged({3, 1, 4})}, {1, 1}}), (std::set<int64_t>{0, 1, 2, 3, 4, 5}));
}

TEST(MovesExamples, RankClasses) {
  const MeshPtr mesh = test::mesh_of({8});
  RankClasses classes(*mesh);
  classes.add(test::layout_of(mesh, {10}, "S(0)"), test::layout_of(mesh, {10}, "R"));
  EXPECT_EQ(classes.sample().positions, (std::vector<int64_t>{0, 5}));
  EXPECT_EQ(classes.sample().weights, (std::vector<int64_t>{5, 3}));
}

TEST(MovesExamples, ExchangeAndDistance) {
  const MeshPtr mesh = test::mesh_of({2, 4});
  const Layout src = test::layout_of(mesh, {8}, "S(0),R");
  const Layout dst = test::layout_of(mesh, {8}, "R,S(0)");
  const std::optional<Step> step = move_between(src, dst);
  ASSERT_TRUE(step);
  EXPECT_EQ(step->mesh_dims, MeshDimSet::single(0));
  EXPECT_EQ(mesh_exchange_of(*step).traffic_at(0), (Traffic{0, 8, 0, 1}));
  EXPECT_EQ(mesh_exchange_of(*step).traffic_at(4), (Traffic{8, 0, 1, 0}));
  MoveTable table(src, Lowering::kNccl);
  const MoveTable::Distance distance = table.distance(table.state(src.cuts(), {}), table.state(dst.cuts(), {}));
  EXPECT_EQ(distance.missing_max, 2);
  EXPECT_EQ(distance.missing_min, 0);
  EXPECT_EQ(distance.sources, 2);
}

// Rows of 1 KiB. Ranks 0 and 1 are one node, ranks 2 and 3 the other.
TEST(MovesExamples, Segments) {
  const MeshPtr second = test::mesh_of({2}, {2, 3});
  const Layout src = test::layout_of(test::mesh_of({2}), {16, 256}, "S(0)");
  const Layout crossed = test::layout_of(second, {16, 256}, "S(0)");
  const Layout dst = test::layout_of(second, {16, 256}, "R");
  const Link link{0, kMicrosecond};
  const Topology topology{"two nodes", 2, kMicrosecond, 0, link, {0, kMicrosecond + 1}, {}};
  Plan plan{src, dst, Lowering::kNccl, Objective::kTime, topology, false, {}};
  plan.steps.push_back({StepOp::kCross, {}, src, crossed, ReplicaPolicy::kWholeMessages});
  plan.steps.push_back({StepOp::kAllGather, MeshDimSet::single(0), crossed, dst});
  for (const auto& [count, time] : std::vector<std::pair<int64_t, double>>{{1, 18}, {2, 16}, {4, 18}}) {
    plan.segments.count = count;
    EXPECT_EQ(microseconds(predicted_picoseconds(plan)), time) << count;
  }
  const std::vector<int64_t> times{12 * kMicrosecond, 4 * kMicrosecond, 2 * kMicrosecond};
  EXPECT_EQ(microseconds(segments_lower_bound(times, 3 * kMicrosecond / 2)), 16.5);
}

TEST(MovesExamples, LowerBounds) {
  const MeshPtr mesh = test::mesh_of({4});
  const auto bound = [&](const std::string& src, const std::string& dst) {
    const Bound bytes = lower_bound(test::layout_of(mesh, {8}, src), test::layout_of(mesh, {8}, dst));
    return std::pair(bytes.bytes_max / 4, bytes.bytes_sum / 4);
  };
  EXPECT_EQ(bound("S(0)", "R"), (std::pair<int64_t, int64_t>(6, 24)));
  EXPECT_EQ(bound("P", "S(0)"), (std::pair<int64_t, int64_t>(6, 24)));
}

TEST(SearchExamples, BalancedStripes) {
  const MeshPtr mesh = test::mesh_of({8});
  const std::optional<Layout> stripes =
      balanced_stripes(test::layout_of(test::mesh_of({4}), {56}, "S(0)"), test::layout_of(mesh, {56}, "S(0)"),
                       test::layout_of(mesh, {56}, "R"));
  ASSERT_TRUE(stripes);
  EXPECT_EQ(stripes->placements_string(), "[Ragged(0,7:6:6:6:7:8:8:8)]");
}

TEST(SearchExamples, Choices) {
  const std::vector<int> tensor_dims{0, 1};
  Choices choices(test::layout_of(test::mesh_of({2, 2}), {8, 8}, "S(0),R"), tensor_dims);
  choices.allow_cut(1);
  std::vector<std::string> found;
  for (const Layout& layout : choices.all()) found.push_back(layout.placements_string());
  EXPECT_EQ(found, (std::vector<std::string>{"[S(0), R]", "[S(0), S(0)]", "[S(0), S(1)]"}));
}

TEST(SearchExamples, States) {
  const MeshPtr mesh = test::mesh_of({2, 2});
  const Layout src = test::layout_of(mesh, {8}, "S(0),R");
  MoveTable table(src, Lowering::kNccl);
  std::set<std::string> lists;
  for (const MoveTable::State& state :
       states_between(src, test::layout_of(mesh, {8}, "R,S(0)"), MeshDimSet::from_bits(3), table)) {
    const Cuts cuts = table.cuts(state);
    std::string text;
    for (const Cut& cut : cuts[0]) text += cut.rule.text(0) + mesh->dim_names()[cut.mesh_dim] + " ";
    lists.insert(text);
  }
  EXPECT_EQ(lists,
            (std::set<std::string>{"", "S(0)a ", "S(0)a S(0)b ", "S(0)b ", "S(0)b S(0)a ", "SS(0,2)a ", "SS(0,2)b "}));
}

TEST(SearchExamples, Relays) {
  const Layout layout = test::layout_of(test::mesh_of({4, 8}), {64}, "R,S(0)");
  EXPECT_EQ(relays_in_blocks(layout, 2)->placements_string(), "[R, S(0)]");
  EXPECT_EQ(relays_in_blocks(layout, 2)->mesh().to_string(), "relay=2,relay.1=8");
  EXPECT_EQ(relays_in_blocks(layout, 8)->placements_string(), "[S(0)]");
  EXPECT_EQ(to_ints(relays_in_blocks(layout, 8)->mesh().ranks()), (std::vector<int64_t>{0, 2, 4, 6}));
}

TEST(SearchExamples, LevelsOfRelays) {
  const Topology topology{"", 0, 12 * kMicrosecond, 0, {4 * kMicrosecond, 0}, {}, {}};
  std::map<int64_t, double> times;
  for (const RelayShapes::Shape& shape :
       RelayShapes(test::layout_of(test::mesh_of({2048}), {2048}, "S(0)"), topology).all(1)) {
    times[shape.levels] = microseconds(shape.picoseconds);
  }
  times.erase(7);
  EXPECT_EQ(times, (std::map<int64_t, double>{{2, 384}, {3, 184}, {4, 144}, {5, 140}, {6, 140}}));
}

TEST(SearchExamples, Splits) {
  EXPECT_EQ(ways_to_split(*test::mesh_of({2048}), 0, 8),
            (std::vector<std::vector<int64_t>>{{256, 8}, {16, 16, 8}, {64, 32}}));
}

}  // namespace
}  // namespace shardwright
