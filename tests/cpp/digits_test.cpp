// Compares the closed formulas for even cuts with a walk over the parts.
#include <gtest/gtest.h>

#include "cost/cost.h"
#include "exchange/digits.h"
#include "layouts.h"
#include "moves/move.h"
#include "moves/move_table.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "pair_by_pair.h"
#include "support/error.h"

namespace shardwright {
namespace {

struct Setting {
  std::vector<int64_t> mesh;
  std::vector<int64_t> shape;
  size_t stride;
};

const std::vector<Setting> kSettings{
    {{2, 4}, {16, 8}, 1},  {{4, 2}, {8, 24}, 1},        {{2, 2, 2}, {8, 16}, 7},
    {{3, 2}, {12, 6}, 1},  {{6, 4}, {48, 24}, 1},       {{2, 3, 2}, {12, 24}, 11},
    {{4, 4}, {16, 64}, 1}, {{2, 2, 2}, {8, 7, 8}, 301}, {{3, 2}, {7, 5}, 1},
};

// Includes strided cuts, because gathers produce them.
std::vector<Layout> layouts_of(const Setting& setting) {
  const MeshPtr mesh = test::mesh_of(setting.mesh);
  std::vector<Layout> all = test::all_layouts(mesh, setting.shape, {});
  const size_t plain = all.size();
  for (size_t i = 0; i < plain; ++i) {
    std::vector<std::vector<Cut>> cuts = all[i].cuts();
    bool changed = false;
    for (auto& list : cuts) {
      if (list.empty()) continue;
      for (int d = 0; d < mesh->ndim() && !changed; ++d) {
        if (all[i].cut_dims().contains(d)) continue;
        list.front().rule = mesh->dim_size(d);
        changed = true;
      }
    }
    if (changed) all.push_back(all[i].with(std::move(cuts), all[i].placements()));
  }
  return all;
}

TEST(Digits, CountTheElementsThatTwoLayoutsShare) {
  int64_t closed = 0;
  int64_t pairs = 0;
  for (const Setting& setting : kSettings) {
    const std::vector<Layout> layouts = layouts_of(setting);
    for (size_t pair = 0; pair < layouts.size() * layouts.size(); pair += setting.stride) {
      const Layout& a = layouts[pair / layouts.size()];
      const Layout& b = layouts[pair % layouts.size()];
      const SharedElements shared(a, b);
      ++pairs;
      closed += !shared.matchings().empty();
      int64_t sum = 0;
      for (int64_t p = 0; p < a.mesh().size(); ++p) {
        const int64_t walked = shared_elements(a.region(p), b.region(p));
        ASSERT_EQ(shared.at(p), walked) << a.to_string() << " and " << b.to_string() << " at " << p;
        sum += walked;
      }
      ASSERT_EQ(shared.sum(), sum) << a.to_string() << " and " << b.to_string();
    }
  }
  EXPECT_GT(closed, pairs / 2);
  EXPECT_LT(closed, pairs);
}

// Compares the traffic of every rank, message by message.
TEST(Digits, PredictTheTrafficOfAnExchange) {
  int64_t exchanges = 0;
  for (const Setting& setting : kSettings) {
    const std::vector<Layout> layouts = layouts_of(setting);
    for (size_t pair = 0; pair < layouts.size() * layouts.size(); pair += 3 * setting.stride) {
      const std::optional<Step> step = move_between(layouts[pair / layouts.size()], layouts[pair % layouts.size()]);
      if (!step || is_local(step->op)) continue;
      ++exchanges;
      const MeshExchange exchange = mesh_exchange_of(*step);
      for (int64_t p = 0; p < step->before.mesh().size(); ++p) {
        const std::string which = concat(step->before.to_string(), " -> ", step->after.placements_string(), " at ", p);
        ASSERT_EQ(exchange.traffic_at(p), test::pair_by_pair(*step, p)) << which;
      }
    }
  }
  EXPECT_GT(exchanges, 500);
}

// Compares the planner's costs of an exchange whose replicas share the sending with a count on every rank.
TEST(Digits, PredictTheTrafficOfASharedExchange) {
  int64_t shared = 0;
  for (const Setting& setting : kSettings) {
    const std::vector<Layout> layouts = layouts_of(setting);
    for (size_t pair = 0; pair < layouts.size() * layouts.size(); pair += setting.stride) {
      const std::optional<Step> direct = move_between(layouts[pair / layouts.size()], layouts[pair % layouts.size()]);
      if (!direct || is_local(direct->op) || SharedElements(direct->before, direct->after).matchings().empty())
        continue;
      const Step step = with_policy_if_cheaper(*direct, ReplicaPolicy::kWholeMessages, {});
      if (step.policy == ReplicaPolicy::kAligned) continue;
      ++shared;
      const MeshExchange exchange = mesh_exchange_of(step);
      Traffic maxima;
      for (int64_t p = 0; p < step.before.mesh().size(); ++p) {
        const Traffic one = exchange.traffic_at(p);
        maxima.received_bytes = std::max(maxima.received_bytes, one.received_bytes);
        maxima.sent_bytes = std::max(maxima.sent_bytes, one.sent_bytes);
        maxima.messages = std::max(maxima.messages, one.messages);
        maxima.sent_messages = std::max(maxima.sent_messages, one.sent_messages);
      }
      const StepCounts counts = step_counts(step, Lowering::kNccl);
      const std::string which = concat(step.before.to_string(), " -> ", step.after.placements_string());
      ASSERT_EQ(counts.received_bytes, maxima.received_bytes) << which;
      ASSERT_EQ(counts.sent_bytes, maxima.sent_bytes) << which;
      ASSERT_EQ(counts.messages, maxima.messages) << which;
      ASSERT_EQ(counts.sent_messages, maxima.sent_messages) << which;
    }
  }
  EXPECT_GT(shared, 50);
}

TEST(Digits, HaveStrideSizeAndMeshDimOfEachCut) {
  const MeshPtr mesh = test::mesh_of({4, 2});
  const auto digits = digits_of(*mesh, 64, std::vector<Cut>{{0, 1}, {1, 1}});
  ASSERT_TRUE(digits.has_value());
  EXPECT_EQ((*digits)[0], (Digit{16, 4, 0}));
  EXPECT_EQ((*digits)[1], (Digit{8, 2, 1}));
  EXPECT_EQ(digits_of(*mesh, 64, std::vector<Cut>{{1, 4}, {0, 1}}), digits);  // different cuts that make the same parts
  EXPECT_FALSE(digits_of(*mesh, 65, std::vector<Cut>{{0, 1}}).has_value());
  EXPECT_FALSE(digits_of(*mesh, 0, std::vector<Cut>{{0, 1}}).has_value());
}

// Parts have one element or none: data moves in another group than the first rank's, or between inner ranks.
TEST(Digits, CountAMessageInEveryExchange) {
  for (const auto& [sizes, from, to] : std::vector<std::tuple<std::vector<int64_t>, const char*, const char*>>{
           {{2, 2}, "R,S(0)", "S(0),S(0)"}, {{2, 3}, "R,SS(0,2)", "R,S(0)"}}) {
    const MeshPtr mesh = test::mesh_of(sizes);
    const std::optional<Step> step = move_between(test::layout_of(mesh, {2}, from), test::layout_of(mesh, {2}, to));
    ASSERT_TRUE(step.has_value());
    const StepCounts found = step_counts(*step, Lowering::kNccl);
    const TrafficTotals exact = totals(*step, Lowering::kNccl);
    EXPECT_EQ(found.messages, exact.messages_max) << from;
    EXPECT_EQ(found.received_bytes, exact.received_bytes_max) << from;
  }
}

// The number of pieces is a product of split factors, which may be far larger than the tensor dim.
TEST(Digits, CountPiecesBeyond64Bits) {
  const MeshPtr mesh = test::mesh_of({2, 2, 2, 2});
  const std::string strided = "SS(0,1048576)";
  const Layout src = test::layout_of(mesh, {7}, strided + "," + strided + "," + strided + "," + strided);
  const Layout dst = test::layout_of(mesh, {7}, "S(0),R,R,R");
  MoveTable table(src, Lowering::kNccl);
  EXPECT_TRUE(table.takes_long(table.state(src.cuts(), {}), table.state(dst.cuts(), {})));
}

}  // namespace
}  // namespace shardwright
