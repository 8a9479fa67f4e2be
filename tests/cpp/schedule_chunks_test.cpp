// Steps with weights in chunks: the example by hand, and what must hold for random ones.
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
  return std::any_of(s.weights.begin(), s.weights.end(), [](const Weight& w) { return w.form_of >= 0; });
}

TEST(ScheduleChunks, TheExampleOfTheHeader) {
  const std::vector<Weight> weights = {{"a", 0, 100, 0, 0, 30, 0}, {"b", 0, 100, 0, 0, 10, 0}};
  const std::vector<Use> uses = {{{0}, F, {}, 50}, {{1}, F, {}, 50}};
  const std::vector<ChunkedForm> forms = {{0, 0, 0, 20, 30, 3}};
  EXPECT_EQ(predict(schedule_with_chunks(weights, uses, {}, {{}, false, false})).total_ps, 130);
  const StepSchedule s = schedule_with_chunks(weights, uses, forms, {{}, false, false});
  EXPECT_EQ(predict(s).total_ps, 110);
  EXPECT_EQ(s.uses[0].weights, std::vector<int>{2});
  EXPECT_EQ(s.weights[2].name, "a in chunks");
  EXPECT_EQ(s.weights[2].form_of, 0);
  EXPECT_EQ(s.peak_bytes(), 256 + 20);  // b, and the chunks
}

TEST(ScheduleChunks, OnlyWhereItIsFasterOrNothingElseFits) {
  std::vector<Weight> weights = {{"a", 0, 100, 0, 0, 30, 0}, {"b", 0, 100, 0, 0, 10, 0}};
  std::vector<Use> uses = {{{0}, F, {}, 50}, {{1}, F, {}, 50}};
  const auto plan = [&](const ChunkedForm& form, std::optional<int64_t> budget, bool may_add) {
    ScheduleOptions options;
    options.budget_bytes = budget;
    options.alignment_bytes = 1;
    return schedule_with_chunks(weights, uses, {form}, {options, false, may_add});
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

TEST(ScheduleChunks, HoldsForRandomSteps) {
  std::mt19937 random(7);
  int with_chunks = 0;
  for (int round = 0; round < 300; ++round) {
    const int n = 2 + static_cast<int>(random() % 4);
    std::vector<Weight> weights;
    std::vector<ChunkedForm> forms;
    std::vector<Use> uses;
    int64_t most = 0;
    for (int w = 0; w < n; ++w) {
      const auto bytes = static_cast<int64_t>(1 + random() % 9) * 100;
      most = std::max(most, bytes);
      weights.push_back({std::string(1, static_cast<char>('a' + w)), 0, bytes, 0, bytes, bytes, bytes});
      if (random() % 2) forms.push_back({w, 10, 5, bytes / 4, bytes, 8});
    }
    for (int w = 0; w < n; ++w) uses.push_back({{w}, F, {}, static_cast<int64_t>(1 + random() % 500)});
    for (int w = n; random() % 2 && w-- > 0;) uses.push_back({{w}, B, {w}, static_cast<int64_t>(1 + random() % 900)});
    ScheduleOptions options;
    options.alignment_bytes = 1;
    if (random() % 2) options.budget_bytes = 3 * most;
    const bool chooses = random() % 2;
    const StepSchedule whole = schedule_with_chunks(weights, uses, {}, {options, chooses, false});
    const StepSchedule s = schedule_with_chunks(weights, uses, forms, {options, chooses, false});
    EXPECT_LE(s.peak_bytes(), options.budget_bytes.value_or(s.peak_bytes()));
    EXPECT_LE(predict(s).total_ps, predict(whole).total_ps);
    if (!has_chunks(s)) continue;
    ++with_chunks;
    EXPECT_LT(predict(s).total_ps, predict(whole).total_ps);
    for (size_t i = 0; i < uses.size(); ++i) {
      const int used = s.uses[i].weights[0];
      EXPECT_EQ(s.weights[used].form_of < 0 ? used : s.weights[used].form_of, uses[i].weights[0]);
      // At each use one of both is there, not the other.
      int there = 0;
      for (const WeightBuffer& b : s.buffers) {
        const bool is_it = b.weight == uses[i].weights[0] || s.weights[b.weight].form_of == uses[i].weights[0];
        there += is_it && b.first <= static_cast<int>(i) && static_cast<int>(i) <= b.last ? 1 : 0;
      }
      EXPECT_EQ(there, 1);
    }
  }
  EXPECT_GT(with_chunks, 15);
}

}  // namespace
}  // namespace shardwright
