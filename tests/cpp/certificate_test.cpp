// Certificates: the costs of plans, their bounds, and remarks.
#include "planning/certificate.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "layouts.h"
#include "moves/describe.h"
#include "planning/memory_limit.h"
#include "planning/validate.h"
#include "search/make_plan.h"
#include "search/search.h"

namespace shardwright {
namespace {

bool mentions(const std::vector<std::string>& sentences, const std::string& words) {
  return std::any_of(sentences.begin(), sentences.end(),
                     [&](const std::string& sentence) { return sentence.find(words) != std::string::npos; });
}

// Checks for every pair on a mesh that no value is below its bound, and that a remark explains each value above it.
TEST(Certificate, NoValueIsBelowItsBound) {
  int64_t num_at_bound = 0;
  int64_t num_values = 0;
  for (const Lowering lowering : {Lowering::kNccl, Lowering::kGloo}) {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{64, 64}, {7, 5}}) {
      const MeshPtr mesh = test::mesh_of({2, 4});
      const std::vector<Layout> all = test::all_layouts(mesh, shape, {Placement::partial(ReduceOp::kSum)});
      for (size_t pair = 0; pair < all.size() * all.size(); pair += 3) {
        const Layout& src = all[pair / all.size()];
        const Layout& dst = all[pair % all.size()];
        const Plan plan = make_plan(src, dst, {lowering});
        const Certificate certificate = certify(plan, peak_bytes(plan));
        size_t missed = 0;
        for (const BoundedValue& bounded : bounded_values(certificate)) {
          // With a reduction, the bound of the worst rank is a mean. A plan may miss it but cannot go below it.
          ASSERT_GE(bounded.value, bounded.bound) << bounded.name << " of " << to_string(plan);
          missed += bounded.value > bounded.bound;
          num_at_bound += bounded.value == bounded.bound;
          ++num_values;
        }
        ASSERT_EQ(remarks(plan, certificate).empty(), missed == 0 && certificate.replicas_are_bitwise_equal)
            << to_string(plan);
        ASSERT_EQ(to_string(plan, &certificate.traffic), to_string(plan)) << "what a step receives, from all totals";
      }
    }
  }
  EXPECT_GT(num_at_bound, num_values / 2);
}

// Ranks may hold any shares of a value that becomes partial, so a plan may receive less than a gather.
TEST(Certificate, BoundsHoldForAnExchangeAndAZeroFill) {
  const MeshPtr mesh = test::mesh_of({2, 4});
  const Layout shares = test::layout_of(mesh, {64, 64}, "R,S(0)");
  Plan plan = make_plan(test::layout_of(mesh, {64, 64}, "S(0),R"), shares);
  plan.dst = test::layout_of(mesh, {64, 64}, "R,P");
  plan.steps.push_back({StepOp::kZeroFill, MeshDimSet::single(1), shares, plan.dst});
  ASSERT_NO_THROW(check_steps(plan)) << to_string(plan);
  for (const BoundedValue& bounded : bounded_values(certify(plan, peak_bytes(plan)))) {
    EXPECT_GE(bounded.value, bounded.bound) << bounded.name << " of " << to_string(plan);
  }
}

TEST(Certificate, RemarksCompareWithThePlanOfFewestBytes) {
  Topology topology = Topology::named("64x8");
  topology.ranks_per_node = 4;
  const MeshPtr mesh = test::mesh_of({4, 4});
  const Plan plan =
      make_plan(test::layout_of(mesh, {64, 64}, "S(0),S(1)"), test::layout_of(mesh, {64, 64}, "S(1),S(0)"),
                {Lowering::kNccl, Objective::kTime, false, topology});
  const Certificate certificate = certify(plan, peak_bytes(plan));
  if (certificate.traffic.received_bytes_max > certificate.received.bytes_max) {
    EXPECT_TRUE(mentions(remarks(plan, certificate), "fewest bytes"));
  }
}

TEST(Certificate, ReportsWhetherReplicasAreBitwiseEqual) {
  const MeshPtr mesh = test::mesh_of({8, 8});
  const auto certificate_of = [&](const std::string& src, const std::string& dst, PlanOptions options) {
    const Plan plan =
        make_plan(test::layout_of(mesh, {4096, 4096}, src), test::layout_of(mesh, {4096, 4096}, dst), options);
    return certify(plan, peak_bytes(plan));
  };
  EXPECT_TRUE(certificate_of("P,R", "R,R", {}).replicas_are_bitwise_equal);  // slices first, reduces once, gathers
  EXPECT_TRUE(certificate_of("P,P", "R,R", {}).replicas_are_bitwise_equal);
  EXPECT_TRUE(certificate_of("P,R", "R,R", {Lowering::kGloo}).replicas_are_bitwise_equal);
  EXPECT_TRUE(certificate_of("P,R", "R,R", {Lowering::kNccl, Objective::kTime, true}).replicas_are_bitwise_equal);
  const Plan direct = plan_through({test::layout_of(mesh, {64, 64}, "P,R"), test::layout_of(mesh, {64, 64}, "R,R")});
  const Certificate apart = certify(direct, peak_bytes(direct));
  EXPECT_FALSE(apart.replicas_are_bitwise_equal);
  EXPECT_TRUE(mentions(remarks(direct, apart), "ordered"));
  const auto is_equal = [&](const std::string& src, const std::string& dtype) {
    const Plan plan = plan_through(
        {test::layout_of(mesh, {64, 64}, src, {}, dtype), test::layout_of(mesh, {64, 64}, "R,R", {}, dtype)});
    return certify(plan, peak_bytes(plan)).replicas_are_bitwise_equal;
  };
  EXPECT_FALSE(is_equal("P(avg),R", "bfloat16"));
  EXPECT_FALSE(is_equal("P,R", "complex64"));
  EXPECT_TRUE(is_equal("P,R", "int32"));
  EXPECT_TRUE(is_equal("P(max),R", "float32"));
}

}  // namespace
}  // namespace shardwright
