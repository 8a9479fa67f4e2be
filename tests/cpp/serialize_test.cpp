#include "planning/serialize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "layouts.h"
#include "moves/describe.h"
#include "moves/move.h"
#include "planning/validate.h"
#include "search/make_plan.h"
#include "support/error.h"
#include "two_mesh_plans.h"
#include "wire.h"

namespace shardwright {
namespace {

using test::layout_of;
using test::mesh_of;

Plan plan_of(const std::vector<int64_t>& mesh_sizes, const std::string& src, const std::string& dst,
             const PlanOptions& options = {}) {
  const MeshPtr mesh = mesh_of(mesh_sizes);
  return make_plan(layout_of(mesh, {12, 7}, src), layout_of(mesh, {12, 7}, dst), options);
}

TEST(Serialize, RoundTripsPlans) {
  for (const char* src : {"S(0),R", "P,S(1)", "P(norm 0.3),R", "SS(0,3),S(0)", "R,R"}) {
    for (const char* dst : {"R,R", "S(1),S(0)", "P,S(0)", "P(avg),R", "P(norm 0.3),S(1)"}) {
      for (const Objective objective : {Objective::kTime, Objective::kBytes}) {
        std::optional<Plan> plan;
        try {
          plan = plan_of({2, 3}, src, dst, {Lowering::kGloo, objective});
        } catch (const UserError&) {
          continue;  // undefined, e.g. S(0) to P(avg)
        }
        const std::string bytes = to_bytes(*plan);
        const Plan again = from_bytes(bytes);
        EXPECT_EQ(to_bytes(again), bytes);
        EXPECT_EQ(to_string(again), to_string(*plan));
      }
    }
  }
}

// Steps may have other names for their layouts than move_between() gives, which finds fewer moves for some names than
// the search does.
TEST(Serialize, RoundTripsPlansBetweenAllKindsOfCuts) {
  const unsigned seed = 12;
  std::mt19937 random(seed);
  const auto pick = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  int64_t steps = 0;
  for (int i = 0; i < 3000; ++i) {
    const std::vector<int64_t> sizes = i % 2 == 0 ? std::vector<int64_t>{2, 2} : std::vector<int64_t>{2, 2, 2};
    const MeshPtr mesh = mesh_of(sizes);
    const std::vector<int64_t> shape = i % 3 == 0 ? std::vector<int64_t>{24} : std::vector<int64_t>{8, 6};
    const auto any = [&](bool may_be_due) {
      const auto n = shape[0];
      const std::vector<std::string> all{"P",
                                         "R",
                                         "S(0)",
                                         "Cyclic(0,1)",
                                         "SS(0,2)",
                                         "SS(0,4)",
                                         "Blocks(0,2)",
                                         "Owned(0,0)",
                                         concat("Ragged(0,1:", n - 1, ")"),
                                         concat("Packed(0,", n / 2, ":", n / 2, ")"),
                                         concat("S(", shape.size() - 1, ")")};
      std::vector<std::string> placements;
      for (size_t d = 0; d < sizes.size(); ++d)
        placements.push_back(all[pick(may_be_due ? 0 : 1, std::ssize(all) - 1)]);
      return join(placements, ",");
    };
    std::optional<Layout> src;
    std::optional<Layout> dst;
    try {
      src = Layout(mesh, shape, DType::kFloat32, parse_placements(any(true)), {}, StridedMeaning::kLiteral);
      dst = Layout(mesh, shape, DType::kFloat32, parse_placements(any(false)), {}, StridedMeaning::kLiteral);
    } catch (const UserError&) {
      continue;  // Ragged or Packed of unequal parts
    }
    SCOPED_TRACE(concat("seed ", seed, ", pair ", i, ": ", *src, " -> ", *dst));
    const Plan plan = make_plan(*src, *dst, {.lowering = i % 5 == 0 ? Lowering::kGloo : Lowering::kNccl});
    steps += std::ssize(plan.steps);
    const std::string bytes = to_bytes(plan);
    ASSERT_NO_THROW(ASSERT_EQ(to_bytes(from_bytes(bytes)), bytes)) << to_string(plan);
  }
  EXPECT_GT(steps, 2000);
}

struct Change {
  const char* name;
  std::function<void(Plan&)> apply;
};

void PrintTo(const Change& change, std::ostream* out) { *out << change.name; }

class Refused : public testing::TestWithParam<Change> {};

// A slice of P(sum) is reduced, and the replicas of the slice are gathered again: slice, all_reduce, all_gather.
TEST_P(Refused, IfStepsDoNotLeadToTheDestination) {
  const MeshPtr mesh = mesh_of({8, 8});
  Plan plan = make_plan(layout_of(mesh, {1024, 1024}, "P,R"), layout_of(mesh, {1024, 1024}, "R,R"));
  ASSERT_EQ(plan.steps.size(), 3u);
  ASSERT_NO_THROW(from_bytes(to_bytes(plan)));
  GetParam().apply(plan);
  EXPECT_THROW(from_bytes(to_bytes(plan)), UserError) << to_string(plan);
}

INSTANTIATE_TEST_SUITE_P(
    Serialize, Refused,
    testing::Values(
        Change{"NoFirstStep", [](Plan& p) { p.steps.erase(p.steps.begin()); }},
        Change{"NoLastStep", [](Plan& p) { p.steps.pop_back(); }}, Change{"NoSteps", [](Plan& p) { p.steps.clear(); }},
        Change{"OtherOrder", [](Plan& p) { std::swap(p.steps[0], p.steps[1]); }},
        Change{"TwiceTheSame", [](Plan& p) { p.steps.push_back(p.steps.back()); }},
        Change{"SliceThatGathers", [](Plan& p) { p.steps[2].op = StepOp::kSlice; }},
        Change{"PermuteThatGathers", [](Plan& p) { p.steps[2].op = StepOp::kPermute; }},
        Change{"GatherThatSlices", [](Plan& p) { p.steps[0].op = StepOp::kAllGather; }},
        Change{"ExchangeThatReduces", [](Plan& p) { p.steps[1].op = StepOp::kExchange; }},
        Change{"ScatterThatKeepsAll", [](Plan& p) { p.steps[1].op = StepOp::kReduceScatter; }},
        Change{"ZeroFillOfNothing", [](Plan& p) { p.steps[0].op = StepOp::kZeroFill; }},
        Change{"PartitionOfNothing", [](Plan& p) { p.steps[0].op = StepOp::kPartition; }},
        Change{"TooFewMeshDims", [](Plan& p) { p.steps[2].mesh_dims = MeshDimSet::single(0); }},
        Change{"TooManyMeshDims", [](Plan& p) { p.steps[1].mesh_dims.insert(1); }},
        Change{"SharingOfAGather", [](Plan& p) { p.steps[2].policy = ReplicaPolicy::kEvenBytes; }},
        Change{"GatherInOrder", [](Plan& p) { p.steps[2].ordered = true; }},
        Change{"OtherSource", [](Plan& p) { p.src = p.dst; }},
        Change{"OtherDestination", [](Plan& p) { p.dst = layout_of(p.src.mesh_ptr(), {1024, 1024}, "S(0),R"); }},
        Change{"PendingAgain", [](Plan& p) { p.dst = p.src; }},
        Change{"NegativeLatency", [](Plan& p) { p.topology.step_ps = -1; }},
        Change{"EndlessLatency", [](Plan& p) { p.topology.step_ps = std::numeric_limits<int64_t>::max(); }}),
    [](const auto& info) { return info.param.name; });

TEST(Serialize, RejectsTooManySteps) {
  const MeshPtr mesh = mesh_of({4});
  Plan plan = make_plan(layout_of(mesh, {8, 8}, "R"), layout_of(mesh, {8, 8}, "R"));
  const Step slice = *move_between(layout_of(mesh, {8, 8}, "R"), layout_of(mesh, {8, 8}, "S(0)"));
  const Step gather = named_by_collective(*move_between(layout_of(mesh, {8, 8}, "S(0)"), layout_of(mesh, {8, 8}, "R")));
  plan.steps = {slice, gather};
  EXPECT_NO_THROW(from_bytes(to_bytes(plan)));
  while (plan.steps.size() < 1000) plan.steps.insert(plan.steps.end(), {slice, gather});
  EXPECT_THROW(from_bytes(to_bytes(plan)), UserError);
}

// Returns a plan of this one step.
Plan plan_of_step(StepOp op, MeshDimSet mesh_dims, const Layout& before, const Layout& after) {
  const ReplicaPolicy policy = is_cross_or_rearrange(op) ? ReplicaPolicy::kWholeMessages : ReplicaPolicy::kAligned;
  return {before, after, Lowering::kNccl, Objective::kTime, {}, false, {{op, mesh_dims, before, after, policy}}};
}

// Elements that are on several ranks would be added several times.
TEST(Serialize, RejectsZeroFillsOfOverlappingParts) {
  const auto zero_fill = [](const Layout& before, const Layout& after) {
    return plan_of_step(StepOp::kZeroFill, after.partial_dims(), before, after);
  };
  const MeshPtr mesh = mesh_of({2, 2});
  EXPECT_NO_THROW(check_steps(
      zero_fill(layout_of(mesh, {6, 4}, "Pieces(0,0-4:2-6),S(1)"), layout_of(mesh, {6, 4}, "Pieces(0,0-4:2-6),P"))));
  EXPECT_THROW(
      check_steps(zero_fill(layout_of(mesh, {6, 4}, "Pieces(0,0-4:2-6),S(1)"), layout_of(mesh, {6, 4}, "P,S(1)"))),
      UserError);
}

TEST(Serialize, RejectsStepsThatChangeFlatteningWithoutARearrangement) {
  const auto flat = [](const MeshPtr& mesh, const std::string& placements) {
    return Layout(mesh, {4, 6}, DType::kFloat32, parse_placements(placements), {}, StridedMeaning::kAuto, 2);
  };
  const MeshPtr mesh = mesh_of({2});
  const MeshDimSet all = MeshDimSet::single(0);
  EXPECT_NO_THROW(check_steps(plan_of_step(StepOp::kZeroFill, all, flat(mesh, "S(0)"), flat(mesh, "P"))));
  EXPECT_THROW(check_steps(plan_of_step(StepOp::kZeroFill, all, flat(mesh, "S(0)"), layout_of(mesh, {4, 6}, "P"))),
               UserError);
  EXPECT_THROW(check_steps(plan_of_step(StepOp::kZeroFill, all, layout_of(mesh, {4, 6}, "S(0)"), flat(mesh, "P"))),
               UserError);

  const MeshPtr other = mesh_of({2}, {2, 3});
  EXPECT_NO_THROW(check_steps(plan_of_step(StepOp::kCross, {}, flat(mesh, "S(0)"), flat(other, "R"))));
  EXPECT_NO_THROW(check_steps(plan_of_step(StepOp::kRearrange, {}, flat(mesh, "S(0)"), layout_of(other, {4, 6}, "R"))));
  EXPECT_THROW(check_steps(plan_of_step(StepOp::kCross, {}, flat(mesh, "S(0)"), layout_of(other, {4, 6}, "R"))),
               UserError);
  EXPECT_THROW(check_steps(plan_of_step(StepOp::kCross, {}, layout_of(mesh, {4, 6}, "Pieces(0,0-3:1-4)"),
                                        layout_of(other, {4, 6}, "R"))),
               UserError);
}

// Ranks that hold different contributions cannot share the sending.
TEST(Serialize, RejectsReplicaPoliciesForContributions) {
  const MeshPtr mesh = mesh_of({2, 2, 2});
  Plan plan = make_plan(layout_of(mesh, {8, 8}, "P,S(0),R"), layout_of(mesh, {8, 8}, "P,S(1),R"));
  ASSERT_EQ(plan.steps.size(), 1u);
  plan.steps[0].op = StepOp::kExchange;
  plan.steps[0].policy = ReplicaPolicy::kEvenBytes;
  plan.steps[0].mesh_dims = MeshDimSet::from_bits(0b110);
  EXPECT_NO_THROW(from_bytes(to_bytes(plan)));
  plan.steps[0].mesh_dims = MeshDimSet::from_bits(0b011);
  EXPECT_THROW(from_bytes(to_bytes(plan)), UserError);
}

std::string bytes_of(const Mesh& mesh) {
  std::string bytes = test::little_endian(mesh.ndim());
  for (const std::string& name : mesh.dim_names()) bytes += test::little_endian(name.size()) + name;
  bytes += test::little_endian(mesh.ndim());
  for (const int64_t size : mesh.dim_sizes()) bytes += test::little_endian(size);
  if (mesh.ranks_are_positions()) return bytes + test::little_endian(0);
  bytes += test::little_endian(mesh.size());
  for (const Rank rank : mesh.ranks()) bytes += test::little_endian(to_int(rank));
  return bytes;
}

// Plans over relays with one mesh too many or too few, and with ranks that are on neither mesh.
TEST(Serialize, RejectsMeshesThatStepsDoNotReach) {
  const Plan plan =
      make_plan(layout_of(mesh_of({1}), {64}, "R"), layout_of(mesh_of({256}, test::ranks_from(1, 256)), {64}, "R"));
  const std::vector<MeshPtr> relays = meshes_of_relays(plan);
  ASSERT_GE(relays.size(), 2u);
  const std::string bytes = test::without_checksum(to_bytes(plan));
  const std::string src = bytes_of(plan.src.mesh());
  std::vector<std::string> meshes;
  for (const MeshPtr& mesh : relays) meshes.push_back(bytes_of(*mesh));
  meshes.push_back(bytes_of(plan.dst.mesh()));
  const auto header = [&](uint64_t crossings, const std::vector<std::string>& reached) {
    std::string all = src + test::little_endian(crossings);
    for (const std::string& mesh : reached) all += mesh;
    return all;
  };
  const std::string before = header(meshes.size(), meshes);
  const size_t at = bytes.find(before);
  ASSERT_NE(at, std::string::npos);
  const auto with = [&](uint64_t crossings, const std::vector<std::string>& reached) {
    std::string changed = bytes;
    return test::closed(changed.replace(at, before.size(), header(crossings, reached)));
  };
  ASSERT_EQ(to_bytes(from_bytes(with(meshes.size(), meshes))), to_bytes(plan));
  std::vector<std::string> more = meshes, fewer = meshes, foreign = meshes;
  more.insert(more.begin(), meshes.front());
  fewer.erase(fewer.begin());
  foreign[0] = bytes_of(Mesh({"relay"}, {relays[0]->size()}, test::ranks_from(900, relays[0]->size())));
  for (const std::vector<std::string>& reached : {more, fewer, foreign}) {
    EXPECT_THROW(from_bytes(with(reached.size(), reached)), UserError);
  }
  EXPECT_THROW(from_bytes(with(meshes.size() + 1, meshes)), UserError);
  EXPECT_THROW(from_bytes(with(meshes.size() - 1, meshes)), UserError);
  EXPECT_THROW(from_bytes(with(0, {})), UserError);
}

}  // namespace
}  // namespace shardwright
