// Compares memory computed without programs with the programs themselves, on every rank.
#include "program/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>

#include "layouts.h"
#include "moves/collectives.h"
#include "moves/describe.h"
#include "moves/move.h"
#include "program/program.h"
#include "search/make_plan.h"
#include "support/error.h"

namespace shardwright {
namespace {

class Checker {
 public:
  void check(const Plan& plan, int64_t stride = 1) {
    ProgramMemory memory(plan);
    const std::vector<Rank> ranks = ranks_of(plan);
    for (size_t i = 0; i < ranks.size(); i += static_cast<size_t>(stride)) {
      const Program program = compile(plan, ranks[i]);
      ASSERT_EQ(memory.peak_bytes_by_step(ranks[i]), program.peak_bytes_by_step())
          << "rank " << ranks[i] << " of " << to_string(plan) << "\nnamed groups only: " << plan.named_groups_only
          << "\n"
          << program.to_string();
      ++programs_;
    }
    for (const Step& step : plan.steps) {
      ++seen_[step_op_name(step.op)];
      if (step.rounds > 1) ++seen_["rounds"];
      if (step.policy != ReplicaPolicy::kAligned) ++seen_["replica_policy"];
      if (step.ordered) ++seen_["ordered"];
    }
  }

  // Gives every step that may have rounds this number of rounds.
  void check_in_rounds(Plan plan, int64_t rounds) {
    for (Step& step : plan.steps) {
      if (can_run_in_rounds(step, plan.lowering)) step.rounds = rounds;
    }
    check(plan);
  }

  // Checks the one move between the plan's ends, if there is one, with every replica policy.
  void check_shared(const Plan& plan) {
    if (!(plan.src.partial_dims() == plan.dst.partial_dims())) return;
    const std::optional<Step> move = move_between(plan.src, plan.dst);
    if (!move || move->op != StepOp::kExchange) return;
    for (const ReplicaPolicy policy : {ReplicaPolicy::kWholeMessages, ReplicaPolicy::kEvenBytes}) {
      Plan shared = plan;
      shared.steps = {*move};
      shared.steps[0].policy = policy;
      shared.steps[0].mesh_dims = move->mesh_dims | (plan.src.replicated_dims() & plan.dst.cut_dims());
      check(shared);
      check_in_rounds(shared, 2);
    }
  }

  int64_t programs() const { return programs_; }
  int64_t seen(const std::string& what) const { return seen_.contains(what) ? seen_.at(what) : 0; }

 private:
  int64_t programs_ = 0;
  std::map<std::string, int64_t> seen_;
};

class Memory : public testing::TestWithParam<Lowering> {};

TEST_P(Memory, MatchesProgramsOnAllLayoutsOfSmallMeshes) {
  struct Setting {
    std::vector<int64_t> mesh;
    std::vector<int64_t> shape;
    size_t stride;
  };
  const std::vector<Setting> settings{{{2, 2}, {4, 4}, 1},     {{2, 3}, {7, 5}, 1},  {{4}, {6, 2}, 1},
                                      {{3, 2}, {12, 6}, 1},    {{2, 4}, {16, 3}, 3}, {{2, 2, 2}, {8, 8}, 11},
                                      {{2, 2, 2}, {5, 7}, 11}, {{4, 3}, {0, 4}, 11}, {{3, 3}, {4, 3, 2}, 7}};
  Checker checker;
  for (const Setting& setting : settings) {
    const MeshPtr mesh = test::mesh_of(setting.mesh);
    const std::vector<Layout> all = test::all_layouts(mesh, setting.shape, {Placement::partial(ReduceOp::kSum)});
    for (size_t pair = 0; pair < all.size() * all.size(); pair += setting.stride) {
      PlanOptions options;
      options.lowering = GetParam();
      ASSERT_NO_FATAL_FAILURE(checker.check(make_plan(all[pair / all.size()], all[pair % all.size()], options)));
    }
  }
  std::printf("%lld programs\n", static_cast<long long>(checker.programs()));
  EXPECT_GT(checker.programs(), 15'000);
}

// Strided and uneven cuts, shuffled ranks, rounds, shared sending, norms, ordered sums, given groups.
TEST_P(Memory, MatchesProgramsOfRandomPlans) {
  const uint64_t seed = 20261122;
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  const auto below = [&](size_t count) { return static_cast<int64_t>(random() % count); };
  const std::vector<int64_t> lengths{1, 2, 3, 4, 6, 7, 8, 9, 12, 16, 24, 25, 32, 48, 64};
  const std::vector<Placement> reductions{Placement::partial(ReduceOp::kSum), Placement::partial(ReduceOp::kNorm, 2),
                                          Placement::partial(ReduceOp::kMax)};
  Checker checker;
  for (int made = 0; made < 1000;) {
    std::vector<int64_t> sizes(1 + below(4));
    int64_t ranks = 1;
    for (int64_t& size : sizes) ranks *= size = below(8) == 0 ? 8 : 1 + below(5);
    if (ranks > 32) continue;
    std::vector<int64_t> shuffled;
    const bool is_shuffled = below(3) == 0;
    for (int64_t rank = 0; is_shuffled && rank < ranks; ++rank) shuffled.push_back(rank);
    for (size_t i = shuffled.size(); i > 1; --i) std::swap(shuffled[i - 1], shuffled[below(i)]);
    const MeshPtr mesh = test::mesh_of(sizes, shuffled);
    std::vector<int64_t> shape(below(4));
    for (int64_t& length : shape) length = lengths[below(lengths.size())];
    const Placement pending = reductions[below(reductions.size())];
    const auto placements = [&](bool with_sums) {
      std::vector<Placement> all;
      while (all.size() < sizes.size()) {
        const int64_t t = below(shape.size() + (with_sums ? 3 : 1)) - 1;
        if (t < 0) {
          all.push_back(Placement::replicate());
        } else if (t >= static_cast<int64_t>(shape.size())) {
          all.push_back(pending);
        } else {
          all.push_back(below(6) == 0 ? Placement::strided_shard(t, 1 + below(4)) : Placement::shard(t));
        }
      }
      return all;
    };
    PlanOptions options;
    options.lowering = GetParam();
    options.objective = below(3) == 0 ? Objective::kBytes : Objective::kTime;
    options.ordered = below(5) == 0;
    if (below(4) == 0) {
      options.groups = {MeshDimSet::from_bits((1u << sizes.size()) - 1)};
      for (size_t d = 0; d < sizes.size(); ++d) options.groups.push_back(MeshDimSet::single(static_cast<int>(d)));
    }
    const Layout src(mesh, shape, DType::parse("float32"), placements(below(2) == 0));
    const Layout dst(mesh, shape, DType::parse("float32"), placements(below(6) == 0));
    try {
      const Plan plan = make_plan(src, dst, options);
      ASSERT_NO_FATAL_FAILURE(checker.check(plan));
      ASSERT_NO_FATAL_FAILURE(checker.check_in_rounds(plan, std::vector<int64_t>{2, 3, 7}[below(3)]));
      ASSERT_NO_FATAL_FAILURE(checker.check_shared(plan));
      ++made;
    } catch (const UserError&) {  // no such redistribution, or the groups do not suffice
    }
  }
  std::printf("%lld programs\n", static_cast<long long>(checker.programs()));
  for (const char* what : {"slice", "partition", "zero_fill", "all_gather", "all_to_all", "permute", "exchange",
                           "reduce_scatter", "all_reduce", "rounds", "replica_policy", "ordered"}) {
    EXPECT_GT(checker.seen(what), 5) << what;
  }
}

// Groups are too large to examine every pair.
TEST_P(Memory, MatchesProgramsOfLargeGroups) {
  const MeshPtr mesh = test::mesh_of({40, 16});
  Checker checker;
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{1280, 640}, {1283, 650}, {639, 3}}) {
    for (const auto& [from, to] : std::vector<std::pair<const char*, const char*>>{{"S(0),S(0)", "S(1),S(1)"},
                                                                                   {"S(1),S(0)", "S(0),S(1)"},
                                                                                   {"S(0),S(0)", "R,R"},
                                                                                   {"P,P", "S(0),S(0)"},
                                                                                   {"P,P", "R,R"}}) {
      PlanOptions options;
      options.lowering = GetParam();
      const Layout src = test::layout_of(mesh, shape, from);
      const Layout dst = test::layout_of(mesh, shape, to);
      ASSERT_NO_FATAL_FAILURE(checker.check(make_plan(src, dst, options), 71));
      ASSERT_NO_FATAL_FAILURE(checker.check(plan_through({src, dst}, options), 71));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Program, Memory, testing::Values(Lowering::kNccl, Lowering::kGloo),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shardwright
