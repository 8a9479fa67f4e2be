// All placements S, R and P, with all orders of cuts, from every small mesh to every other, run on all ranks of both.
#include <gtest/gtest.h>

#include <vector>

#include "exchange/bounds.h"
#include "layouts.h"
#include "moves/describe.h"
#include "moves/traffic.h"
#include "search/make_plan.h"
#include "simulate/simulate.h"

namespace shardwright {
namespace {

using test::all_layouts;
using test::mesh_of;

struct MeshPair {
  const char* name;
  std::vector<int64_t> src, src_ranks;
  std::vector<int64_t> dst, dst_ranks;
};

std::ostream& operator<<(std::ostream& out, const MeshPair& pair) { return out << pair.name; }

class TwoMeshesExhaustive : public testing::TestWithParam<MeshPair> {};

// Without pending reductions, the plan of fewest bytes must reach all bounds.
TEST_P(TwoMeshesExhaustive, EveryElementArrivesWithinTheBounds) {
  const MeshPtr src_mesh = mesh_of(GetParam().src, GetParam().src_ranks);
  const MeshPtr dst_mesh = mesh_of(GetParam().dst, GetParam().dst_ranks);
  const std::vector<Placement> sums{Placement::partial(ReduceOp::kSum)};
  int64_t plans = 0;
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{6, 4}, {5, 3}, {0, 3}, {1}, {}}) {
    for (const Layout& src : all_layouts(src_mesh, shape, sums)) {
      for (const Layout& dst : all_layouts(dst_mesh, shape, sums)) {
        simulate(make_plan(src, dst, {.lowering = Lowering::kNccl}));
        const Plan fewest = make_plan(src, dst, {.lowering = Lowering::kGloo, .objective = Objective::kBytes});
        simulate(fewest);
        plans += 2;
        const TrafficTotals traffic = totals(fewest);
        const ExchangeBound bound = exchange_bound(src, dst);
        ASSERT_GE(traffic.received_bytes_sum, bound.received_bytes_sum) << to_string(fewest);
        if (!src.partial_dims().empty() || !dst.partial_dims().empty()) continue;
        ASSERT_EQ(traffic.received_bytes_max, bound.received_bytes_max) << to_string(fewest);
        ASSERT_EQ(traffic.received_bytes_sum, bound.received_bytes_sum) << to_string(fewest);
        ASSERT_EQ(traffic.sent_bytes_max, bound.direct_sent_bytes_max) << to_string(fewest);
      }
    }
  }
  EXPECT_GT(plans, 100);
}

INSTANTIATE_TEST_SUITE_P(Meshes, TwoMeshesExhaustive,
                         testing::Values(MeshPair{"2_to_3_disjoint", {2}, {0, 1}, {3}, {2, 3, 4}},
                                         MeshPair{"2_to_3_overlapping", {2}, {0, 1}, {3}, {1, 2, 0}},
                                         MeshPair{"3_to_2_disjoint", {3}, {0, 1, 2}, {2}, {4, 3}},
                                         MeshPair{"3_to_2_overlapping", {3}, {0, 1, 2}, {2}, {2, 3}},
                                         MeshPair{"2x2_to_3_disjoint", {2, 2}, {0, 1, 2, 3}, {3}, {4, 5, 6}},
                                         MeshPair{"2x2_to_3_overlapping", {2, 2}, {0, 1, 2, 3}, {3}, {3, 4, 1}},
                                         MeshPair{"3_to_2x2_disjoint", {3}, {0, 1, 2}, {2, 2}, {3, 4, 5, 6}},
                                         MeshPair{"3_to_2x2_overlapping", {3}, {2, 0, 1}, {2, 2}, {1, 2, 3, 4}},
                                         MeshPair{"2x2_to_2x2_disjoint", {2, 2}, {0, 1, 2, 3}, {2, 2}, {4, 5, 6, 7}},
                                         MeshPair{"2x2_to_2x2_overlapping", {2, 2}, {0, 1, 2, 3}, {2, 2}, {2, 3, 4, 5}},
                                         MeshPair{"2x2_to_2x2_permuted", {2, 2}, {0, 1, 2, 3}, {2, 2}, {3, 1, 2, 0}}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardwright
