// Plans from one mesh to another, run on all ranks of both: every element, bytes and memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "layouts.h"
#include "moves/describe.h"
#include "moves/traffic.h"
#include "picture/picture.h"
#include "planning/certificate.h"
#include "planning/json.h"
#include "planning/memory_limit.h"
#include "planning/serialize.h"
#include "program/memory.h"
#include "program/program.h"
#include "search/make_plan.h"
#include "simulate/simulate.h"
#include "support/error.h"

namespace shardwright {
namespace {

using test::all_layouts;
using test::layout_of;
using test::mesh_of;

struct MeshPair {
  MeshPtr src;
  MeshPtr dst;
};

// Disjoint, overlapping, one within the other, and the same ranks in another shape or order.
std::vector<MeshPair> mesh_pairs() {
  return {{mesh_of({2}, {0, 1}), mesh_of({3}, {2, 3, 4})},
          {mesh_of({3}, {0, 1, 2}), mesh_of({2}, {2, 5})},
          {mesh_of({2}, {1, 2}), mesh_of({3})},
          {mesh_of({2, 2}), mesh_of({3}, {3, 4, 1})},
          {mesh_of({3}, {6, 4, 2}), mesh_of({2, 2}, {4, 5, 6, 7})},
          {mesh_of({2, 2}), mesh_of({2, 2}, {3, 1, 2, 0})},
          {mesh_of({2, 2}), mesh_of({4})},
          {mesh_of({2, 2}), mesh_of({2, 2}, {4, 5, 6, 7})}};
}

std::vector<Layout> some_layouts(const MeshPtr& mesh, const std::vector<int64_t>& shape, bool are_all) {
  std::vector<Layout> all = all_layouts(mesh, shape, {});
  if (are_all) return all;
  std::vector<Layout> some;
  for (size_t i = 0; i < all.size(); i += 3) some.push_back(all[i]);
  return some;
}

// Runs the plan, and compares the memory it allocates with that of its programs.
void check(const Plan& plan) {
  const Plan read = from_bytes(to_bytes(plan));
  ASSERT_EQ(to_bytes(read), to_bytes(plan));
  const SimulationReport report = simulate(read);
  int64_t maximum = 0;
  for (const auto& [rank, peak] : report.peak_bytes) {
    const Program program = compile(plan, rank);
    ASSERT_EQ(ProgramMemory(plan).peak_bytes_by_step(rank), program.peak_bytes_by_step())
        << "rank " << rank << " of " << to_string(plan) << "\n"
        << program.to_string();
    maximum = std::max(maximum, peak);
  }
  ASSERT_EQ(peak_bytes(plan), maximum) << to_string(plan);
}

TEST(TwoMeshPlans, MoveEveryElementBetweenAllLayouts) {
  int64_t plans = 0;
  for (const auto& [src_mesh, dst_mesh] : mesh_pairs()) {
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{6, 4}, {5, 3}, {0, 3}, {}, {1}}) {
      const bool are_all = src_mesh->ndim() + dst_mesh->ndim() < 4;
      for (const Layout& src : some_layouts(src_mesh, shape, are_all)) {
        for (const Layout& dst : some_layouts(dst_mesh, shape, true)) {
          for (const Lowering lowering : {Lowering::kNccl, Lowering::kGloo}) {
            check(make_plan(src, dst, {.lowering = lowering}));
            ++plans;
          }
        }
      }
    }
  }
  EXPECT_GT(plans, 1000);
}

TEST(TwoMeshPlans, ReducePendingSumsAndCreatePartials) {
  const std::vector<const char*> sources{"P,R", "P,P", "S(0),P", "P(avg),P(avg)", "R,P(max)"};
  for (const char* placements : sources) {
    for (const std::vector<int64_t>& ranks : {std::vector<int64_t>{2, 3, 4}, {7, 8, 9}}) {
      for (const char* wanted : {"R", "S(0)", "S(1)", "P", "P(max)", "P(avg)"}) {
        const Layout src = layout_of(mesh_of({2, 2}), {5, 4}, placements);
        const Layout dst = layout_of(mesh_of({3}, ranks), {5, 4}, wanted);
        check(make_plan(src, dst, {.lowering = Lowering::kGloo}));
        check(make_plan(src, dst, {.lowering = Lowering::kNccl, .objective = Objective::kBytes}));
      }
    }
  }
}

// More ranks than the limit of one all-to-all, shared sending, and rounds under a memory limit.
TEST(TwoMeshPlans, UseRoundsWithinAMemoryLimit) {
  std::vector<int64_t> ranks;
  for (int64_t rank = 6; rank < 12; ++rank) ranks.push_back(17 - rank);
  int64_t in_rounds = 0;
  for (const char* placements : {"S(0),R", "S(1),S(0)", "R,R"}) {
    for (const char* wanted : {"S(1)", "R", "S(0)"}) {
      for (const Lowering lowering : {Lowering::kNccl, Lowering::kGloo}) {
        const Layout src = layout_of(mesh_of({2, 4}), {9, 7}, placements);
        const Layout dst = layout_of(mesh_of({6}, ranks), {9, 7}, wanted);
        const int64_t peak = peak_bytes(make_plan(src, dst, {.lowering = lowering}));
        for (const int64_t limit : {peak, peak * 3 / 4, peak / 2}) {
          try {
            const Plan plan = make_plan_within(src, dst, {.lowering = lowering}, limit);
            check(plan);
            EXPECT_LE(peak_bytes(plan), limit);
            for (const Step& step : plan.steps) in_rounds += step.op == StepOp::kCross && step.rounds > 1;
          } catch (const UserError& error) {
            EXPECT_NE(std::string(error.what()).find("memory_limit"), std::string::npos) << error.what();
          }
        }
      }
    }
  }
  EXPECT_GT(in_rounds, 0);
}

TEST(TwoMeshPlans, TextJsonAndPictureNameBothMeshes) {
  const Plan plan = make_plan(layout_of(mesh_of({2}), {8}, "S(0)"), layout_of(mesh_of({3}, {2, 3, 4}), {8}, "S(0)"));
  ASSERT_EQ(plan.steps.size(), 1u);
  EXPECT_EQ(to_ints(ranks_of(plan)), (std::vector<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_NE(to_string(plan).find("float32[8] on a=2 as [S(0)] -> [S(0)] on a=3"), std::string::npos) << to_string(plan);
  EXPECT_NE(to_string(plan).find("1. cross to a=3: [S(0)] -> [S(0)]"), std::string::npos) << to_string(plan);
  EXPECT_NE(to_json(plan, certify(plan, peak_bytes(plan)), {}).find("\"destination_mesh\""), std::string::npos);
  EXPECT_EQ(certify(plan, peak_bytes(plan)).received.bytes_sum, 32);
  EXPECT_NE(to_svg(plan).find("cross to a=3"), std::string::npos);
  const Program outside = compile(plan, Rank{4});
  EXPECT_EQ(outside.buffers[0].shape, std::vector<int64_t>{0});
  EXPECT_EQ(compile(plan, Rank{0}).outputs[0].shape, std::vector<int64_t>{0});
  EXPECT_THROW(compile(plan, Rank{5}), UserError);
}

// If every rank holds what it needs, no group is made and no rank waits.
TEST(TwoMeshPlans, OnlyCopyIfNothingIsSent) {
  for (const Lowering lowering : {Lowering::kNccl, Lowering::kGloo}) {
    for (const auto& [ranks, wanted] :
         std::vector<std::pair<std::vector<int64_t>, const char*>>{{{2, 0, 1}, "S(0)"}, {{1}, "R"}, {{0, 2}, "R"}}) {
      const Layout src = layout_of(mesh_of({3}), {6, 4}, "R");
      const Layout dst = layout_of(mesh_of({static_cast<int64_t>(ranks.size())}, ranks), {6, 4}, wanted);
      const Plan plan = make_plan(src, dst, {.lowering = lowering});
      check(plan);
      EXPECT_EQ(totals(plan).steps, 0);
      for (const Rank rank : ranks_of(plan)) {
        EXPECT_TRUE(compile(plan, rank).groups.empty()) << to_string(plan);
        EXPECT_LE(compile(plan, rank).instructions.size(), 1u);
      }
    }
  }
}

// One rank has 64 KiB that eight need. It must send them once if others forward them, else eight times.
TEST(TwoMeshPlans, CertificatesHaveSendBounds) {
  const Layout src = layout_of(mesh_of({1}), {16384}, "R");
  const Layout dst = layout_of(mesh_of({8}, {1, 2, 3, 4, 5, 6, 7, 8}), {16384}, "R");
  const Plan plan = make_plan(src, dst, {.objective = Objective::kBytes});
  const Certificate certificate = certify(plan, peak_bytes(plan));
  ASSERT_TRUE(certificate.crossing.has_value());
  EXPECT_EQ(certificate.traffic.sent_bytes_max, 8 * 65536);
  EXPECT_EQ(certificate.crossing->direct_sent_bytes_max, 8 * 65536);
  EXPECT_EQ(certificate.crossing->forwarded_sent_bytes_max, 65536);
  EXPECT_EQ(certificate.least_sent_bytes, 65536);
  const std::vector<std::string> sentences = remarks(plan, certificate);
  const auto names_send_bounds = [](const std::string& sentence) {
    return sentence.find("if only ranks of the source send, the bound is 512 KiB") != std::string::npos &&
           sentence.find("if ranks forward what they receive, it is 64 KiB") != std::string::npos;
  };
  EXPECT_TRUE(std::any_of(sentences.begin(), sentences.end(), names_send_bounds));
  EXPECT_NE(to_json(plan, certificate, sentences).find("\"direct_send_bytes_max\": 524288"), std::string::npos);
}

TEST(TwoMeshPlans, AreRejectedIfStepsAreInconsistent) {
  const Layout src = layout_of(mesh_of({2}), {8}, "S(0)");
  const Layout dst = layout_of(mesh_of({3}, {2, 3, 4}), {8}, "S(0)");
  const auto refuses = [](const Plan& plan, const std::string& text) {
    try {
      from_bytes(to_bytes(plan));
      ADD_FAILURE() << "accepted " << to_string(plan);
    } catch (const UserError& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  Plan plan = make_plan(src, dst);
  plan.steps[0].policy = ReplicaPolicy::kAligned;
  refuses(plan, "step 1 must be a valid cross to a=3, got");
  plan = make_plan(src, dst);
  plan.steps[0].ordered = true;
  refuses(plan, "step 1 must be a valid cross to a=3, got");
  plan = make_plan(src, dst);
  plan.steps.clear();
  refuses(plan, "plan must end on the mesh of its destination");
}

}  // namespace
}  // namespace shardwright
