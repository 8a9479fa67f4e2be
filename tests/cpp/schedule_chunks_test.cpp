// Steps with weights in chunks: examples by hand, and invariants of random steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "schedule/chunks.h"
#include "schedule/lanes.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr Pass F = Pass::kForward;
constexpr Pass B = Pass::kBackward;

bool has_chunks(const StepSchedule& s) {
  return std::any_of(s.weights.begin(), s.weights.end(), [](const Weight& w) { return w.original >= 0; });
}

TEST(ScheduleChunks, MatchTheExampleOfTheHeader) {
  const std::vector<Weight> weights = {{"a", 0, 100, 0, 0, 30, 0}, {"b", 0, 100, 0, 0, 10, 0}};
  const std::vector<Use> uses = {{{0}, F, {}, 50}, {{1}, F, {}, 50}};
  const std::vector<ChunkedWeight> chunked_weights = {{0, 0, 0, 20, 30, 3}};
  EXPECT_EQ(predict(schedule_with_chunks(weights, uses, {}, {{}, false, false})).total_ps, 130);
  const StepSchedule s = schedule_with_chunks(weights, uses, chunked_weights, {{}, false, false});
  EXPECT_EQ(predict(s).total_ps, 110);
  EXPECT_EQ(s.uses[0].weights, std::vector<int>{2});
  EXPECT_EQ(s.weights[2].name, "a in chunks");
  EXPECT_EQ(s.weights[2].original, 0);
  EXPECT_EQ(s.peak_bytes(), 256 + 20);  // b, and the chunks
  const std::string json = to_json(s);
  EXPECT_NE(json.find("{\"name\": \"a\", \"rest_bytes\": 0, \"use_bytes\": 100, \"keep_bytes\": 0, \"gradient_bytes\": "
                      "0, \"gather_ps\": 30, \"reduce_ps\": 0, \"original\": -1, \"gathered_in_chunks_ps\": 0"),
            std::string::npos)
      << json;
  EXPECT_NE(json.find("\"original\": 0, \"gathered_in_chunks_ps\": 30, \"reduced_in_chunks_ps\": 0"), std::string::npos)
      << json;
}

// The last reduction of a backward; only one chunk of four stays exposed.
TEST(ScheduleChunks, HideTheLastReduction) {
  std::vector<Weight> weights = {{"a", 0, 100, 0, 100, 30, 20}, {"b", 0, 100, 0, 100, 30, 20}};
  std::vector<Use> uses = {{{0}, F, {}, 50}, {{1}, F, {}, 50}, {{1}, B, {1}, 100}, {{0}, B, {0}, 100}};
  const ChunkedReduction reduction{{{20, 5}}, 0, 110};
  const std::vector<ChunkedWeight> chunked_weights = {{0, 0, 0, 20, 30, 1, true, reduction},
                                                      {1, 0, 0, 20, 30, 1, true, reduction}};
  ScheduleOptions options;
  options.alignment_bytes = 1;
  const auto plan = [&](const std::vector<ChunkedWeight>& with) {
    return schedule_with_chunks(weights, uses, with, {options, false, false});
  };
  EXPECT_EQ(predict(plan({})).total_ps, 350);
  const StepSchedule s = plan(chunked_weights);
  const StepLanes lanes = predict(s);
  EXPECT_EQ(lanes.total_ps, 335) << to_text(s);
  EXPECT_EQ(lanes.transfer_ps, 100);
  ASSERT_EQ(s.reductions.size(), 2);
  EXPECT_FALSE(s.reductions[0].in_chunks) << "that of b runs alongside the backward of a";
  EXPECT_TRUE(s.reductions[1].in_chunks);
  EXPECT_EQ(s.uses[3].in_chunks, std::vector<int>{0});
  const std::string json = to_json(s);
  EXPECT_NE(json.find("{\"weight\": 1, \"first\": 2, \"start\": 2, \"finish\": 3, \"in_chunks\": false}"),
            std::string::npos)
      << json;
  EXPECT_NE(json.find("{\"weight\": 0, \"first\": 3, \"start\": 3, \"finish\": 3, \"in_chunks\": true}"),
            std::string::npos)
      << json;
  ASSERT_EQ(lanes.chunks.size(), 2);
  EXPECT_EQ(lanes.chunks[0].span.begin_ps, 280) << "the second half of the backward computes it";
  EXPECT_EQ(lanes.chunks[1].span.end_ps, 335);
  EXPECT_EQ(s.peak_gradient_bytes, 210);
  EXPECT_NE(to_text(s).find("3. backward a; in chunks: reduce the gradient of a; after: wait for the gradient of b, a"),
            std::string::npos)
      << to_text(s);
  uses[3].compute_ps = 0;
  EXPECT_FALSE(plan(chunked_weights).reductions[1].in_chunks) << "no times";
  uses[3] = {{0}, B, {}, 100, {0}};
  EXPECT_THROW(plan(chunked_weights), UserError) << "its gradient is not complete";
}

// A unit around another one: the gradient of its projection is made in the first use of the backward, others in the
// last.
TEST(ScheduleChunks, HideTheReductionOfAnOuterUnit) {
  const std::vector<Weight> weights = {{"r", 0, 100, 0, 100, 30, 40}, {"a", 0, 100, 0, 100, 10, 20}};
  std::vector<Use> uses;
  for (const Pass pass : {F, B}) {
    const int64_t compute_ps = pass == F ? 50 : 100;
    uses.insert(uses.end(), {{{0}, pass, {}, compute_ps}, {{0, 1}, pass, {}, compute_ps}, {{0}, pass, {}, compute_ps}});
  }
  uses[4].gradients = {1};
  uses[5].gradients = {0};
  ChunkedWeight chunked{0, 0, 0, 20, 30, 3, true, {{{20, 5, 3}, {7, 2}, {3, 1, 5}}, 10, 110}};
  const auto plan = [&] { return schedule_with_chunks(weights, uses, {chunked}, {{}, false, false}); };
  EXPECT_EQ(predict(schedule_with_chunks(weights, uses, {}, {{}, false, false})).total_ps, 520);
  const StepSchedule s = plan();
  const StepLanes lanes = predict(s);
  EXPECT_FALSE(has_chunks(s)) << "it is gathered whole";
  EXPECT_EQ(s.uses[5].in_chunks, std::vector<int>{0});
  EXPECT_EQ(lanes.total_ps, 497) << to_text(s);
  EXPECT_EQ(lanes.transfer_ps, 30 + 10 + 20 + 40);
  std::vector<std::pair<int, int64_t>> ends;
  for (const ChunksSpan& c : lanes.chunks) ends.emplace_back(c.use, c.span.end_ps);
  EXPECT_EQ(ends, (std::vector<std::pair<int, int64_t>>{{3, 245}, {3, 285}, {5, 443}, {5, 487}}));
  const std::string last = "5. backward r (use 2); in chunks: reduce the gradient of r; after: wait for";
  EXPECT_NE(to_text(s).find("3. backward r; in chunks: reduce the gradient of r\n"), std::string::npos) << to_text(s);
  EXPECT_NE(to_text(s).find(last), std::string::npos) << to_text(s);
  chunked.reduction.products.resize(1);
  EXPECT_NE(to_text(plan()).find("5. backward r (use 2); after: reduce the rest of the gradient of r; after: wait for"),
            std::string::npos)
      << to_text(plan());
  chunked.reduction.products[0].use = 6;
  EXPECT_FALSE(plan().reductions[1].in_chunks) << "no such use";
}

// Memory has room for one weight between forward and backward, so each weight is gathered twice, and nothing is
// computed before.
TEST(ScheduleChunks, HideTheFirstGatherOfABackward) {
  const std::vector<Weight> weights = {{"a", 0, 100, 0, 0, 30, 0}, {"b", 0, 100, 0, 0, 30, 0}};
  const std::vector<Use> uses = {{{0}, F, {}, 50}, {{1}, F, {}, 50}, {{0}, B, {}, 100}};
  ScheduleOptions options;
  options.alignment_bytes = 1;
  options.budget_bytes = 100 + 20;
  options.prefetch = 0;
  const auto plan = [&](bool in_backwards) {
    const ChunkedWeight chunked{0, 0, 0, 20, 30, 3, in_backwards, {}};
    return schedule_with_chunks(weights, uses, {chunked}, {options, false, false});
  };
  const StepSchedule forward = plan(false);
  const StepSchedule both = plan(true);
  EXPECT_EQ(forward.uses[2].weights, std::vector<int>{0});
  EXPECT_EQ(predict(forward).total_ps, 200 + 10 + 30 + 30) << to_text(forward);
  EXPECT_EQ(both.uses[2].weights, std::vector<int>{2});
  EXPECT_EQ(predict(both).total_ps, 200 + 10 + 30 + 10) << to_text(both);
}

// No unsharded weight fits, and a forward and the backward after it gather the same weight in chunks.
TEST(ScheduleChunks, ServeForwardsAndBackwardsInLittleMemory) {
  const std::vector<Weight> weights = {{"a", 0, 100, 0, 10, 0, 0}, {"b", 0, 100, 0, 10, 0, 0}};
  std::vector<Use> uses = {{{0}, F, {}}, {{1}, F, {}}, {{1}, B, {1}}, {{0}, B, {0}}};
  std::vector<ChunkedWeight> chunked_weights = {{0, 5, 0, 20, 30, 3, true, {}}, {1, 5, 0, 20, 30, 3, true, {}}};
  ScheduleOptions options;
  options.alignment_bytes = 1;
  options.budget_bytes = 5 + 20 + 10;
  const StepSchedule s = schedule_with_chunks(weights, uses, chunked_weights, {options, false, false});
  EXPECT_LE(s.peak_bytes(), 35);
  std::vector<int> used;
  for (const Use& use : s.uses) used.push_back(s.weights[use.weights[0]].original);
  EXPECT_EQ(used, (std::vector<int>{0, 1, 1, 0}));
  EXPECT_EQ(s.reductions[0].first, 2) << "a gradient exists where the chunked weight is used";
  options.budget_bytes = 5 + 5 + 20 + 10;
  const StepSchedule stays = schedule_with_chunks(weights, uses, chunked_weights, {options, false, false});
  EXPECT_EQ(stays.gathers.size(), 2) << "what is not in chunks stays from forward to backward";
  for (int use = 0; use < 4; ++use) EXPECT_EQ(stays.gathered_within(use), stays.uses[use].weights) << to_text(stays);
  EXPECT_NE(to_text(stays).find("3. backward a in chunks; in chunks: gather a;"), std::string::npos) << to_text(stays);
  uses.insert(uses.begin() + 2, {{1}, Pass::kRecompute, {}});
  EXPECT_THROW(schedule_with_chunks(weights, uses, chunked_weights, {options, false, false}), UserError);
  chunked_weights[1].in_backwards = false;
  uses.erase(uses.begin() + 2);
  EXPECT_THROW(schedule_with_chunks(weights, uses, chunked_weights, {options, false, false}), UserError);
}

TEST(ScheduleChunks, AreUsedOnlyIfFasterOrIfNothingElseFits) {
  std::vector<Weight> weights = {{"a", 0, 100, 0, 0, 30, 0}, {"b", 0, 100, 0, 0, 10, 0}};
  std::vector<Use> uses = {{{0}, F, {}, 50}, {{1}, F, {}, 50}};
  const auto plan = [&](const ChunkedWeight& chunked, std::optional<int64_t> budget, bool may_add) {
    ScheduleOptions options;
    options.budget_bytes = budget;
    options.alignment_bytes = 1;
    return schedule_with_chunks(weights, uses, {chunked}, {options, false, may_add});
  };
  EXPECT_FALSE(has_chunks(plan({0, 0, 0, 20, 30, 1}, {}, false))) << "one chunk hides nothing";
  EXPECT_FALSE(has_chunks(plan({1, 0, 0, 20, 10, 5}, {}, false))) << "nothing waits for b";
  EXPECT_TRUE(has_chunks(plan({0, 0, 0, 20, 30, 3}, 200, false)));
  EXPECT_FALSE(has_chunks(plan({0, 0, 0, 120, 30, 3}, 200, false))) << "chunks do not fit";
  EXPECT_TRUE(has_chunks(plan({0, 0, 0, 120, 30, 3}, 200, true)));
  uses[0].compute_ps = uses[1].compute_ps = 0;
  EXPECT_FALSE(has_chunks(plan({0, 0, 0, 20, 30, 3}, 200, false))) << "no times";
  weights[0].use_bytes = 1000;
  const StepSchedule small = plan({0, 0, 0, 20, 30, 3}, 120, false);
  EXPECT_TRUE(has_chunks(small));
  EXPECT_LE(small.peak_bytes(), 120);
  EXPECT_THROW(plan({0, 0, 0, 21, 30, 3}, 120, false), UserError);
  EXPECT_THROW(plan({2, 0, 0, 21, 30, 3}, 120, false), UserError);
  uses = {{{0}, F, {}, 50}, {{0, 1}, F, {}, 50}};
  EXPECT_FALSE(has_chunks(plan({0, 0, 0, 20, 30, 3}, {}, false))) << "two uses in a row";
}

TEST(ScheduleChunks, NeverSlowDownRandomSteps) {
  std::mt19937 random(7);
  int with_chunks = 0;
  int with_reductions = 0;
  for (int round = 0; round < 300; ++round) {
    const int n = 2 + static_cast<int>(random() % 4);
    std::vector<Weight> weights;
    std::vector<ChunkedWeight> chunked_weights;
    std::vector<Use> uses;
    int64_t most = 0;
    for (int w = 0; w < n; ++w) {
      const auto bytes = static_cast<int64_t>(1 + random() % 9) * 100;
      most = std::max(most, bytes);
      weights.push_back({std::string(1, static_cast<char>('a' + w)), 0, bytes, 0, bytes, bytes, bytes});
      const ChunkedReduction reduction{{{bytes, bytes / 8}}, 5, bytes + 40};
      if (random() % 2) chunked_weights.push_back({w, 10, 5, bytes / 4, bytes, 8, random() % 2 == 0, reduction});
    }
    for (int w = 0; w < n; ++w) uses.push_back({{w}, F, {}, static_cast<int64_t>(1 + random() % 500)});
    for (int w = n; random() % 2 && w-- > 0;) uses.push_back({{w}, B, {w}, static_cast<int64_t>(1 + random() % 900)});
    ScheduleOptions options;
    options.alignment_bytes = 1;
    if (random() % 2) options.budget_bytes = 3 * most;
    const bool chooses = random() % 2;
    const StepSchedule whole = schedule_with_chunks(weights, uses, {}, {options, chooses, false});
    const StepSchedule s = schedule_with_chunks(weights, uses, chunked_weights, {options, chooses, false});
    EXPECT_LE(s.peak_bytes(), options.budget_bytes.value_or(s.peak_bytes()));
    EXPECT_LE(predict(s).total_ps, predict(whole).total_ps);
    const auto in_chunks =
        std::count_if(s.reductions.begin(), s.reductions.end(), [](const Reduction& r) { return r.in_chunks; });
    with_reductions += in_chunks > 0 ? 1 : 0;
    if (!has_chunks(s) && in_chunks == 0) continue;
    with_chunks += has_chunks(s) ? 1 : 0;
    EXPECT_LT(predict(s).total_ps, predict(whole).total_ps);
    for (size_t i = 0; i < uses.size(); ++i) {
      const int used = s.uses[i].weights[0];
      EXPECT_EQ(s.weights[used].original < 0 ? used : s.weights[used].original, uses[i].weights[0]);
      // At each use, either a weight or its chunked weight exists, not both.
      int num_buffers = 0;
      for (const WeightBuffer& b : s.buffers) {
        const bool is_it = b.weight == uses[i].weights[0] || s.weights[b.weight].original == uses[i].weights[0];
        num_buffers += is_it && b.first <= static_cast<int>(i) && static_cast<int>(i) <= b.last ? 1 : 0;
      }
      EXPECT_EQ(num_buffers, 1);
    }
  }
  EXPECT_GT(with_chunks, 15);
  EXPECT_GT(with_reductions, 15);
}

}  // namespace
}  // namespace shardwright
