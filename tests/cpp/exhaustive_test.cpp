// Simulates every pair of layouts, in every order of cuts, and compares every element on every rank.
#include <gtest/gtest.h>

#include <iostream>
#include <random>

#include "layouts.h"
#include "moves/describe.h"
#include "moves/traffic.h"
#include "search/make_plan.h"
#include "simulate/simulate.h"
#include "support/error.h"

namespace shardwright {
namespace {

using Shape = std::vector<int64_t>;

struct Case {
  Shape mesh;
  Shape shape;
};

std::string name_of(const testing::TestParamInfo<Case>& info) {
  return "mesh_" + join(info.param.mesh, "x") + "_shape_" + join(info.param.shape, "x");
}

void PrintTo(const Case& c, std::ostream* out) {
  *out << "mesh " << join(c.mesh, "x") << ", shape " << join(c.shape, "x");
}

class Exhaustive : public testing::TestWithParam<Case> {};

TEST_P(Exhaustive, EveryPairIsCorrectAndCostsAsPredicted) {
  const std::vector<Layout> layouts =
      test::all_layouts(test::mesh_of(GetParam().mesh), GetParam().shape, {Placement::partial(ReduceOp::kSum)});
  // The largest case takes longer than all others together. Unless test::is_exhaustive(), it runs every third pair.
  const bool is_largest = GetParam().mesh.size() == 3 && GetParam().shape.size() == 3;
  const size_t stride = is_largest && !test::is_exhaustive() ? 3 : 1;
  const size_t first = std::random_device{}() % stride;
  if (stride > 1) std::cout << "every third pair, from pair " << first << " on\n";
  int64_t pairs = 0;
  int64_t elements = 0;
  for (size_t pair = first; pair < layouts.size() * layouts.size(); pair += stride) {
    const Layout& src = layouts[pair / layouts.size()];
    const Layout& dst = layouts[pair % layouts.size()];
    const Lowering lowering = pair % 2 == 0 ? Lowering::kNccl : Lowering::kGloo;
    const Plan plan = make_plan(src, dst, {lowering});
    SimulationReport report;
    ASSERT_NO_THROW(report = simulate(plan)) << to_string(plan);
    const int64_t bound = lower_bound(src, dst).bytes_sum;
    ASSERT_GE(report.received_bytes_sum, bound) << "below the lower bound: " << to_string(plan);
    elements += report.elements_checked;
    ++pairs;
  }
  std::cout << "simulated " << pairs << " pairs of layouts, " << elements << " elements checked\n";
  RecordProperty("pairs", std::to_string(pairs));
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const Shape& mesh : std::vector<Shape>{{2}, {3}, {2, 2}, {2, 3}, {2, 2, 2}}) {
    for (const Shape& shape : std::vector<Shape>{{64, 64}, {7, 5}, {5, 3}, {1, 1}, {0, 3}, {2, 3, 5}}) {
      cases.push_back({mesh, shape});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Layouts, Exhaustive, testing::ValuesIn(all_cases()), name_of);

void simulate_all_with(const std::vector<Placement>& partials, const std::string& dtype) {
  for (const Shape& mesh_sizes : std::vector<Shape>{{3}, {2, 2}, {2, 3}}) {
    for (const Shape& shape : std::vector<Shape>{{5, 3}, {4, 6}, {1, 0}}) {
      const MeshPtr mesh = test::mesh_of(mesh_sizes);
      std::vector<Layout> layouts;
      for (const Placement& partial : partials) {
        for (const Layout& layout : test::all_layouts(mesh, shape, {})) layouts.push_back(layout);
        for (int d = 0; d < mesh->ndim(); ++d) {
          for (const Placement& other : {Placement::replicate(), Placement::shard(0), Placement::shard(1), partial}) {
            std::vector<Placement> placements(mesh->ndim(), other);
            placements[d] = partial;
            layouts.emplace_back(mesh, shape, DType::parse(dtype), placements);
          }
        }
      }
      for (Layout& layout : layouts) {
        layout = Layout(mesh, shape, DType::parse(dtype), layout.placements());
      }
      int64_t simulated = 0;
      for (const Layout& src : layouts) {
        for (const Layout& dst : layouts) {
          for (const Lowering lowering : {Lowering::kNccl, Lowering::kGloo}) {
            std::optional<Plan> plan;
            try {
              plan = make_plan(src, dst, {lowering});
            } catch (const UserError&) {
              continue;  // e.g. S -> P(max), which is not defined
            }
            ASSERT_NO_THROW(simulate(*plan)) << to_string(*plan);
            ++simulated;
          }
        }
      }
      EXPECT_GT(simulated, 0);
    }
  }
}

TEST(Reductions, EveryOpIsCorrect) {
  for (const ReduceOp op :
       {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
    simulate_all_with({Placement::partial(op)}, "int64");
  }
  simulate_all_with({Placement::partial(ReduceOp::kAvg), Placement::partial(ReduceOp::kSum)}, "float32");
  simulate_all_with({Placement::partial(ReduceOp::kNorm, 2)}, "float32");
  simulate_all_with({Placement::partial(ReduceOp::kNorm, 3)}, "float64");
}

TEST(Reductions, SumAndAvgCombine) {
  const MeshPtr mesh = test::mesh_of({2, 3});
  for (const char* src : {"P(sum),P(avg)", "P(avg),P(sum)", "P(avg),P(avg)"}) {
    for (const char* dst : {"R,R", "S(0),R", "R,S(1)", "S(1),S(0)", "S(0),S(0)"}) {
      for (const Lowering lowering : {Lowering::kNccl, Lowering::kGloo}) {
        EXPECT_NO_THROW(
            simulate(make_plan(test::layout_of(mesh, {5, 3}, src), test::layout_of(mesh, {5, 3}, dst), {lowering})))
            << src << " " << dst;
      }
    }
  }
}

// Parts that only _StridedShard makes, and meshes with shuffled ranks.
TEST(Strided, LiteralPartsAndShuffledMeshesAreCorrect) {
  const MeshPtr mesh = test::mesh_of({2, 2}, {6, 1, 4, 3});
  const std::vector<std::string> texts{"SS(0,3),R", "SS(0,2),S(0)", "S(0),SS(0,5)", "SS(1,3),S(0)", "R,SS(1,2)",
                                       "S(1),S(0)", "R,R",          "P,SS(0,3)",    "P,P",          "SS(0,3),P"};
  for (const Shape& shape : std::vector<Shape>{{7, 5}, {12, 12}, {3, 1}, {24, 2}}) {
    for (const std::string& src : texts) {
      for (const std::string& dst : texts) {
        for (const Lowering lowering : {Lowering::kNccl, Lowering::kGloo}) {
          const Plan plan = make_plan(test::layout_of(mesh, shape, src), test::layout_of(mesh, shape, dst), {lowering});
          ASSERT_NO_THROW(simulate(plan)) << to_string(plan);
        }
      }
    }
  }
}

}  // namespace
}  // namespace shardwright
