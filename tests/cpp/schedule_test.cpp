// Compares schedules of steps with brute force (the fewest gathers), and checks the invariants of every schedule.
#include "schedule/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "schedule/arena.h"
#include "schedule/lanes.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr Pass F = Pass::kForward;
constexpr Pass B = Pass::kBackward;

Use use(int weight, Pass pass, int64_t compute_ps = 0) {
  return {{weight}, pass, pass == B ? std::vector<int>{weight} : std::vector<int>{}, compute_ps};
}

std::vector<Weight> equal_weights(int count, int64_t use_bytes, int64_t gradient_bytes) {
  std::vector<Weight> weights;
  for (int w = 0; w < count; ++w) {
    weights.push_back({std::string(1, static_cast<char>('a' + w)), use_bytes / 4, use_bytes, 0, gradient_bytes, 0});
  }
  return weights;
}

ScheduleOptions options_of(std::optional<int64_t> budget_bytes, int64_t prefetch = 1, int64_t alignment_bytes = 1) {
  return {budget_bytes, prefetch, alignment_bytes};
}

int64_t gradients_at(const StepSchedule& s, int use) {
  int64_t bytes = 0;
  for (const Reduction& r : s.reductions) {
    if (r.first <= use && use <= r.finish) bytes += s.weights[r.weight].gradient_bytes;
  }
  return bytes;
}

// Checks the invariants of every schedule, for any budget.
void check_sound(const StepSchedule& s) {
  const auto n = static_cast<int>(s.uses.size());
  std::map<int, const Gather*> gather_of;
  for (const Gather& g : s.gathers) {
    const WeightBuffer& b = s.buffers[g.buffer];
    EXPECT_FALSE(b.is_kept_copy);
    EXPECT_EQ(b.weight, g.weight);
    EXPECT_EQ(std::count(s.uses[g.needed].weights.begin(), s.uses[g.needed].weights.end(), g.weight), 1);
    EXPECT_EQ(b.first, g.start);
    EXPECT_LE(g.start, g.needed);
    EXPECT_LE(g.needed, b.last);
    EXPECT_TRUE(gather_of.emplace(g.buffer, &g).second) << "a buffer is gathered once";
  }
  int64_t live_most = 0;
  int64_t gradients_most = 0;
  for (int i = 0; i < n; ++i) {
    int64_t live = 0;
    std::vector<int> found;
    for (size_t b = 0; b < s.buffers.size(); ++b) {
      const WeightBuffer& buffer = s.buffers[b];
      if (buffer.first > i || buffer.last < i) continue;
      live += aligned(buffer.size_bytes, s.options.alignment_bytes);
      const std::vector<int>& needed = s.uses[i].weights;
      if (!buffer.is_kept_copy && std::find(needed.begin(), needed.end(), buffer.weight) != needed.end()) {
        found.push_back(buffer.weight);
        EXPECT_LE(gather_of.at(static_cast<int>(b))->needed, i) << "use " << i << " comes before its gather";
      }
    }
    std::vector<int> needed = s.uses[i].weights;
    std::sort(found.begin(), found.end());
    std::sort(needed.begin(), needed.end());
    EXPECT_EQ(found, needed) << "each weight of use " << i << " has one gathered buffer";
    live_most = std::max(live_most, live);
    gradients_most = std::max(gradients_most, gradients_at(s, i));
  }
  EXPECT_EQ(live_most, s.live_buffer_bytes);
  EXPECT_EQ(gradients_most, s.peak_gradient_bytes);
  EXPECT_GE(s.arena_bytes, live_most);
  EXPECT_LE(s.arena_bytes + gradients_most, s.options.budget_bytes.value_or(s.peak_bytes()));
  for (size_t b = 0; b < s.buffers.size(); ++b) {
    const WeightBuffer& x = s.buffers[b];
    EXPECT_EQ(x.offset_bytes % s.options.alignment_bytes, 0);
    EXPECT_LE(x.offset_bytes + x.size_bytes, s.arena_bytes);
    for (size_t c = b + 1; c < s.buffers.size(); ++c) {
      const WeightBuffer& y = s.buffers[c];
      const bool at_one_time = x.first <= y.last && y.first <= x.last;
      const bool overlap =
          x.offset_bytes < y.offset_bytes + y.size_bytes && y.offset_bytes < x.offset_bytes + x.size_bytes;
      EXPECT_FALSE(at_one_time && overlap && x.size_bytes > 0 && y.size_bytes > 0);
    }
  }
}

void check_reductions(const StepSchedule& s) {
  std::vector<std::pair<int, int>> starts;
  std::map<int, Reduction> before_of;
  for (const Reduction& r : s.reductions) {
    EXPECT_LE(r.first, r.start);
    EXPECT_LE(r.start, r.finish);
    EXPECT_LT(r.finish, static_cast<int>(s.uses.size()));
    const auto [before, is_first] = before_of.emplace(r.weight, r);
    EXPECT_TRUE(is_first || (before->second.start < r.first && before->second.finish < r.start))
        << "one at a time for each weight";
    before->second = r;
    for (int i = is_first ? 0 : r.first; i < r.start; ++i) {
      const std::vector<int>& now = s.uses[i].weights;
      const bool has_part = s.uses[i].pass == B && std::find(now.begin(), now.end(), r.weight) != now.end();
      EXPECT_TRUE(!has_part || i >= r.first) << "a gradient exists from its first part on";
    }
    starts.emplace_back(r.start, r.weight);
  }
  std::vector<std::pair<int, int>> complete;
  for (int i = 0; i < static_cast<int>(s.uses.size()); ++i) {
    for (const int w : s.uses[i].gradients) complete.emplace_back(i, w);
  }
  EXPECT_EQ(starts, complete);
}

// Returns the weights that must be resident at each use of a step of weights of one byte.
std::vector<unsigned> needed_of(const std::vector<Use>& uses, int limit, int prefetch) {
  std::vector<unsigned> sets;
  for (const Use& u : uses) {
    sets.push_back(0);
    for (const int w : u.weights) sets.back() |= 1u << w;
  }
  std::vector<unsigned> needed;
  for (size_t i = 0; i < sets.size(); ++i) {
    unsigned set = sets[i];
    int changes = 0;
    for (size_t j = i + 1; j < sets.size() && prefetch > 0; ++j) {
      if ((sets[j] & ~sets[j - 1]) != 0) ++changes;
      if (changes > prefetch || std::popcount(set | sets[j]) > limit) break;
      set |= sets[j];
    }
    needed.push_back(set);
  }
  return needed;
}

// Returns the fewest gathers of any choice of resident weights, by trying all of them.
int fewest_gathers(const std::vector<Use>& uses, int num_weights, int limit, int prefetch) {
  const std::vector<unsigned> needed = needed_of(uses, limit, prefetch);
  std::map<unsigned, int> best{{0u, 0}};
  for (const unsigned must : needed) {
    std::map<unsigned, int> next;
    for (const auto& [before, gathers] : best) {
      for (unsigned after = 0; after < 1u << num_weights; ++after) {
        if ((after & must) != must || std::popcount(after) > limit) continue;
        const int total = gathers + std::popcount(after & ~before);
        const auto [at, is_new] = next.emplace(after, total);
        if (!is_new) at->second = std::min(at->second, total);
      }
    }
    best = std::move(next);
  }
  int fewest = 1 << 20;
  for (const auto& [set, gathers] : best) fewest = std::min(fewest, gathers);
  return fewest;
}

TEST(Schedule, EvictionsAreOptimalForWeightsOfOneSize) {
  // All sequences of six uses of three weights, and of five uses of four.
  for (const auto& [num_weights, num_uses] : {std::pair{3, 6}, {4, 5}}) {
    int sequences = 1;
    for (int i = 0; i < num_uses; ++i) sequences *= num_weights;
    for (int code = 0; code < sequences; ++code) {
      std::vector<Use> uses;
      for (int i = 0, rest = code; i < num_uses; ++i, rest /= num_weights) uses.push_back(use(rest % num_weights, F));
      for (int limit = 1; limit <= num_weights; ++limit) {
        for (const int prefetch : {0, 1, 2}) {
          const StepSchedule s = make_schedule(equal_weights(num_weights, 1, 0), uses, options_of(limit, prefetch));
          ASSERT_EQ(static_cast<int>(s.gathers.size()), fewest_gathers(uses, num_weights, limit, prefetch))
              << to_text(s);
        }
      }
    }
  }
}

// Nested modules: every use needs one or two of four weights.
TEST(Schedule, EvictionsAreOptimalWhereUsesNeedSeveralWeights) {
  for (unsigned seed = 0; seed < 1000; ++seed) {
    std::mt19937 random(seed);
    std::vector<Use> uses;
    for (int i = 0; i < 8; ++i) {
      const int w = static_cast<int>(random() % 4);
      uses.push_back(use(w, F));
      if (random() % 2 == 0) uses.back().weights.push_back((w + 1 + static_cast<int>(random() % 3)) % 4);
    }
    for (int limit = 2; limit <= 4; ++limit) {
      for (const int prefetch : {0, 1, 2}) {
        const StepSchedule s = make_schedule(equal_weights(4, 1, 0), uses, options_of(limit, prefetch));
        check_sound(s);
        ASSERT_EQ(static_cast<int>(s.gathers.size()), fewest_gathers(uses, 4, limit, prefetch)) << to_text(s);
      }
    }
  }
}

// The weight of a model is needed all the time, around those of its layers.
TEST(Schedule, PrefetchesAcrossUsesOfTheOutermostWeight) {
  std::vector<Use> uses{use(0, F)};
  for (int w = 1; w <= 3; ++w) {
    uses.push_back({{0, w}, F, {}, 0});
    uses.push_back(use(0, F));
  }
  const StepSchedule s = make_schedule(equal_weights(4, 100, 0), uses, options_of(300));
  check_sound(s);
  std::vector<std::pair<int, int>> starts;
  for (const Gather& g : s.gathers) starts.emplace_back(g.start, g.needed);
  EXPECT_EQ(starts, (std::vector<std::pair<int, int>>{{0, 0}, {0, 1}, {1, 3}, {3, 5}})) << to_text(s);
  EXPECT_EQ(overlapping_budget_bytes(s.weights, uses, options_of(std::nullopt)), 300);
}

// The same in backward: a reduction runs alongside the backward of the next layer, not just until that begins.
TEST(Schedule, ReducesAlongsideTheNextLayer) {
  std::vector<Use> uses;
  for (int w = 3; w >= 1; --w) {
    uses.push_back({{0}, B, {}, 0});
    uses.push_back({{0, w}, B, {w}, 0});
  }
  uses.push_back({{0}, B, {0}, 0});
  const StepSchedule s = make_schedule(equal_weights(4, 100, 100), uses, options_of(std::nullopt));
  check_sound(s);
  check_reductions(s);
  std::vector<std::vector<int>> spans;
  for (const Reduction& r : s.reductions) spans.push_back({r.weight, r.first, r.start, r.finish});
  EXPECT_EQ(spans, (std::vector<std::vector<int>>{{3, 1, 1, 3}, {2, 3, 3, 5}, {1, 5, 5, 6}, {0, 0, 6, 6}}))
      << to_text(s);
  EXPECT_EQ(s.peak_gradient_bytes, 300);
}

TEST(Schedule, MatchesTheExampleOfTheHeader) {
  const std::vector<Use> uses{use(0, F), use(1, F), use(1, B), use(0, B)};
  const std::vector<Weight> weights = equal_weights(2, 100, 100);
  struct Expected {
    std::optional<int64_t> budget;
    size_t gathers;
    int64_t arena;
    int64_t gradients;
    int finish_of_b;
  };
  for (const Expected& e : {Expected{std::nullopt, 2, 200, 200, 3},
                            {400, 2, 200, 200, 3},
                            {399, 2, 200, 100, 2},
                            {300, 2, 200, 100, 2},
                            {200, 3, 100, 100, 2}}) {
    const StepSchedule s = make_schedule(weights, uses, options_of(e.budget));
    EXPECT_EQ(s.gathers.size(), e.gathers) << to_text(s);
    EXPECT_EQ(s.arena_bytes, e.arena);
    EXPECT_EQ(s.peak_gradient_bytes, e.gradients);
    EXPECT_EQ(s.reductions[0].finish, e.finish_of_b);
    check_sound(s);
  }
  try {
    make_schedule(weights, uses, options_of(199));
    FAIL() << "199 bytes are too few";
  } catch (const UserError& error) {
    EXPECT_STREQ(
        error.what(),
        "budget_bytes must be at least 200, got 199. The minimum is 100 for gathered weights + 100 for gradients");
  }
}

// A deep model, forward and backward: if two or more weights fit, each gather but the first starts one use early.
TEST(Schedule, PrefetchesWhereTheBudgetAllows) {
  constexpr int kLayers = 8;
  std::vector<Use> uses;
  for (int w = 0; w < kLayers; ++w) uses.push_back(use(w, F));
  for (int w = kLayers; w-- > 0;) uses.push_back(use(w, B));
  for (const int64_t buffers : {1, 2, 3, 5, 8}) {
    // With gradients of a tenth, it always pays to overlap reductions.
    const StepSchedule s = make_schedule(equal_weights(kLayers, 100, 10), uses, options_of(100 * buffers + 20));
    check_sound(s);
    EXPECT_EQ(s.arena_bytes, 100 * buffers);
    for (const Gather& g : s.gathers) {
      EXPECT_EQ(g.start, buffers == 1 || g.needed == 0 ? g.needed : g.needed - 1) << to_text(s);
    }
    // The weights at the end of the forward stay for the backward: with k buffers, the last k layers are gathered once.
    EXPECT_EQ(s.gathers.size(), static_cast<size_t>(2 * kLayers - buffers)) << to_text(s);
  }
}

TEST(Schedule, GatherUntilExtendsPrefetch) {
  const std::vector<Use> uses{use(0, F), use(1, F), use(2, F), use(3, F)};
  ScheduleOptions options = options_of(std::nullopt, 0);
  options.gather_until = {2, 0, 0, 0};
  const auto starts = [&](const ScheduleOptions& with) {
    std::vector<int> found;
    for (const Gather& g : make_schedule(equal_weights(4, 100, 0), uses, with).gathers) found.push_back(g.start);
    return found;
  };
  EXPECT_EQ(starts(options), (std::vector<int>{0, 0, 0, 3}));
  EXPECT_EQ(overlapping_budget_bytes(equal_weights(4, 100, 0), uses, options), 300);
  options.budget_bytes = 200;
  EXPECT_EQ(starts(options), (std::vector<int>{0, 0, 2, 3})) << "as far as the budget allows";
}

TEST(Schedule, HeldBytesReduceTheBudget) {
  const std::vector<Use> uses{use(0, F), use(1, F), use(1, B), use(0, B)};
  const StepSchedule without = make_schedule(equal_weights(2, 100, 100), uses, options_of(300));
  ScheduleOptions options = options_of(300);
  options.held_bytes = 70;
  EXPECT_THROW(make_schedule(equal_weights(2, 100, 100), uses, options_of(199)), UserError);
  EXPECT_EQ(make_schedule(equal_weights(2, 100, 100), uses, options).peak_bytes(), 270);
  options.budget_bytes = 370;
  const StepSchedule with = make_schedule(equal_weights(2, 100, 100), uses, options);
  EXPECT_EQ(with.gathers.size(), without.gathers.size());
  EXPECT_EQ(with.peak_bytes(), without.peak_bytes() + 70);
  EXPECT_EQ(overlapping_budget_bytes(equal_weights(2, 100, 100), uses, options),
            overlapping_budget_bytes(equal_weights(2, 100, 100), uses, options_of(std::nullopt)) + 70);
  EXPECT_NE(to_text(with).find(", held 70 B; budget"), std::string::npos) << to_text(with);
}

// An independent simulation, picosecond by picosecond: each lane advances as soon as it can.
int64_t ticked_total(const StepSchedule& s) {
  int64_t now = 0;
  std::vector<std::pair<char, int>> queue;  // transfers that have started, in order: 'g' or 'r', and the index
  std::set<std::pair<char, int>> done;
  int64_t left_of_first = 0;
  const auto push = [&](char kind, int index) {
    const Weight& w = s.weights[kind == 'g' ? s.gathers[index].weight : s.reductions[index].weight];
    if (queue.empty()) left_of_first = kind == 'g' ? w.gather_ps : w.reduce_ps;
    queue.emplace_back(kind, index);
  };
  const auto settle = [&] {
    while (!queue.empty() && left_of_first == 0) {
      done.insert(queue.front());
      queue.erase(queue.begin());
      if (queue.empty()) break;
      const auto [kind, i] = queue.front();
      left_of_first =
          kind == 'g' ? s.weights[s.gathers[i].weight].gather_ps : s.weights[s.reductions[i].weight].reduce_ps;
    }
  };
  const auto tick = [&] {
    ++now;
    if (!queue.empty()) --left_of_first;
    settle();
  };
  const auto await = [&](char kind, int index) {
    settle();
    while (!done.contains({kind, index})) tick();
  };
  for (int i = 0; i < static_cast<int>(s.uses.size()); ++i) {
    for (const int g : s.gathers_before(i)) {
      push('g', g);
      settle();
    }
    for (int g = 0; g < static_cast<int>(s.gathers.size()); ++g) {
      if (s.gathers[g].needed == i) await('g', g);
    }
    for (int64_t t = 0; t < s.uses[i].compute_ps; ++t) tick();
    for (const int r : s.reductions_started_after(i)) {
      push('r', r);
      settle();
    }
    for (const int r : s.reductions_finished_after(i)) await('r', r);
  }
  return now;
}

TEST(Lanes, MatchTheExampleOfTheHeader) {
  std::vector<Weight> weights = equal_weights(2, 1, 1);
  weights[0].gather_ps = weights[1].gather_ps = 30;
  weights[0].reduce_ps = weights[1].reduce_ps = 20;
  const std::vector<Use> uses{use(0, F, 50), use(1, F, 50), use(1, B, 100), use(0, B, 100)};
  const StepLanes lanes = predict(make_schedule(weights, uses, options_of(std::nullopt)));
  EXPECT_EQ(lanes.total_ps, 350);
  EXPECT_EQ(lanes.compute_ps, 300);
  EXPECT_EQ(lanes.transfer_ps, 100);
  EXPECT_EQ(lanes.uses[3].begin_ps, 230);
  EXPECT_EQ(lanes.reductions[0].end_ps, 250);
}

// Two layers whose inputs are kept sharded: 60 bytes of a's, 40 of b's.
std::vector<Activation> inputs() { return {{"b's", 10, 40, 20, 1, 2, 2, 0}, {"a's", 15, 60, 30, 0, 3, 3, 1}}; }

TEST(Activations, AreGatheredOneActivationAheadIfMemoryAllows) {
  const std::vector<Use> uses{use(0, F, 50), use(1, F, 50), use(1, B, 100), use(0, B, 100)};
  std::vector<Weight> weights = equal_weights(2, 100, 0);
  for (Weight& w : weights) w.gather_ps = 30;
  const auto plan = [&](std::optional<int64_t> budget, int64_t prefetch) {
    ScheduleOptions options = options_of(budget, prefetch);
    options.activations = inputs();
    options.activations_ahead = activations_ahead_within(weights, uses, options);
    return make_schedule(weights, uses, options);
  };
  const auto gathers = [](const StepSchedule& s) {
    std::vector<std::pair<int, int>> found;
    for (const ActivationGather& g : s.activation_gathers) found.emplace_back(g.start, g.trigger);
    return found;
  };
  const std::vector<std::pair<int, int>> ahead{{2, -1}, {2, 0}};
  const std::vector<std::pair<int, int>> in_turn{{2, 0}, {3, 1}};
  const StepSchedule s = plan(std::nullopt, 1);
  EXPECT_EQ(gathers(s), ahead);
  EXPECT_EQ(s.peak_activation_bytes, 100);
  EXPECT_EQ(s.peak_bytes(), 300);
  EXPECT_EQ(predict(s).total_ps, 350) << "the first gathers of each direction are exposed";
  EXPECT_EQ(predict(s).activations[1].begin_ps, 150);
  EXPECT_EQ(gathers(plan(200, 1)), ahead);
  EXPECT_EQ(plan(200, 1).gathers.size(), 3) << "b stays, and a is gathered again";
  const StepSchedule small = plan(199, 1);
  EXPECT_EQ(gathers(small), in_turn);
  EXPECT_EQ(small.peak_bytes(), 160);
  EXPECT_EQ(gathers(plan(std::nullopt, 0)), in_turn);
  EXPECT_EQ(predict(plan(std::nullopt, 0)).activations[1].begin_ps, predict(plan(std::nullopt, 0)).uses[3].begin_ps);
  EXPECT_THROW(plan(159, 1), UserError);
  const std::string text = to_text(s);
  EXPECT_NE(text.find("2. backward b; gather activations 0, 1; "), std::string::npos) << text;
  EXPECT_NE(text.find("  activation 1, a's of use 0, in uses 3 to 3: 60 B, of which 15 B are kept\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("gradients 0 B, activations 100 B"), std::string::npos) << text;
  EXPECT_NE(to_json(s).find("\"activations_ahead\": 1,"), std::string::npos) << to_json(s);
  EXPECT_NE(to_json(plan(std::nullopt, 0)).find("\"activations_ahead\": 0,"), std::string::npos);
}

// Several activations in one use. The first is needed until the third has been used.
TEST(Activations, AreGatheredInOrderWithinAUse) {
  const std::vector<Use> uses{use(0, F, 60), use(0, B, 90)};
  ScheduleOptions options = options_of(std::nullopt);
  options.activations = {{"x", 1, 10, 5, 0, 1, 1, 2}, {"y", 1, 20, 5, 0, 1, 1, 1}, {"z", 1, 40, 50, 0, 1, 1, 2}};
  options.activations_ahead = 1;
  std::vector<Weight> weights = equal_weights(1, 8, 0);
  weights[0].gather_ps = 10;
  const StepSchedule s = make_schedule(weights, uses, options);
  EXPECT_EQ(s.peak_activation_bytes, 70) << "x, y and z in the turn of y";
  // The gather of z starts when y is used, at 70 + 5 + 30, and takes longer than that.
  const StepLanes lanes = predict(s);
  EXPECT_EQ(lanes.uses[1].begin_ps, 70);
  EXPECT_EQ(lanes.activations[2].begin_ps, 105);
  EXPECT_EQ(lanes.uses[1].end_ps, 155 + 30);
  options.activations[2].until = 1;
  EXPECT_THROW(make_schedule(weights, uses, options), UserError);
  options.activations[2] = {"z", 1, 40, 50, 0, 0, 1, 2};
  EXPECT_THROW(make_schedule(weights, uses, options), UserError) << "not in the order of their turns";
}

// Sharded parameters are on the host: gathers of 30 begin with copies of 10, reductions of 20 end with copies of 15.
//
//     from the host  ab
//     transfers       aaabbb............BB........AA
//     compute            aaaaabbbbbBBBBBBBBBBAAAAAAAAAA..
//     to the host                                      b A.
TEST(Lanes, HostCopiesExtendGathersAndReductions) {
  std::vector<Weight> weights = equal_weights(2, 1, 1);
  for (Weight& w : weights) {
    w.gather_ps = 30;
    w.reduce_ps = 20;
    w.fetch_ps = 10;
    w.send_ps = 15;
  }
  const std::vector<Use> uses{use(0, F, 50), use(1, F, 50), use(1, B, 100), use(0, B, 100)};
  const StepSchedule s = make_schedule(weights, uses, options_of(std::nullopt));
  const StepLanes lanes = predict(s);
  EXPECT_EQ(lanes.fetches[1].begin_ps, 10);
  EXPECT_EQ(lanes.gathers[0].begin_ps, 10);
  EXPECT_EQ(lanes.gathers[1].end_ps, 70);
  EXPECT_EQ(lanes.sends[0].begin_ps, 340) << "when compute has waited for the reduction";
  EXPECT_EQ(lanes.sends[1].end_ps, 375);
  EXPECT_EQ(lanes.total_ps, 375);
  EXPECT_EQ(lanes.copy_ps, 50);
  EXPECT_EQ(lanes.exposed_ps(), 75);
  EXPECT_NE(lanes_text(s).find("\n  from the host        |"), std::string::npos) << lanes_text(s);
  weights[1].fetch_ps = -1;
  EXPECT_THROW(make_schedule(weights, uses, options_of(std::nullopt)), UserError);
}

// A large weight is gathered before every fourth use, so starting its gather one change of weights earlier is too late.
TEST(Lanes, FastestScheduleUsesTheShortestSufficientPrefetch) {
  std::vector<Weight> weights = equal_weights(12, 10, 0);
  std::vector<Use> uses;
  for (int w = 0; w < 12; ++w) {
    weights[w].gather_ps = w % 4 == 3 ? 280 : 10;
    uses.push_back(use(w, F, 100));
  }
  const auto total = [&](int64_t ahead) {
    return predict(make_schedule(weights, uses, options_of(std::nullopt, ahead))).total_ps;
  };
  EXPECT_EQ(total(1), 10 + 1200 + 3 * 180);
  EXPECT_EQ(total(3), 10 + 1200);
  const StepSchedule s = fastest_schedule(weights, uses, options_of(std::nullopt));
  EXPECT_EQ(s.options.prefetch, 3) << to_text(s);
  EXPECT_EQ(s.live_buffer_bytes, 40);
  EXPECT_EQ(fastest_schedule(weights, uses, options_of(30)).options.prefetch, 2) << "there is room for three weights";
  for (Weight& w : weights) w.gather_ps = 300;  // the link is always busy, however far ahead gathers start
  EXPECT_EQ(fastest_schedule(weights, uses, options_of(std::nullopt)).options.prefetch, 1);
  uses[5].compute_ps = 0;
  EXPECT_FALSE(has_times(fastest_schedule(weights, uses, options_of(std::nullopt))));
}

TEST(Schedule, KeepBytesKeepAWeightOrACopy) {
  const std::vector<Use> uses{use(0, F), use(1, F), use(2, F), use(2, B), use(1, B), use(0, B)};
  std::vector<Weight> weights = equal_weights(3, 100, 0);
  weights[0].keep_bytes = 100;  // stays gathered although the budget is small and its next use is the last
  StepSchedule s = make_schedule(weights, uses, options_of(200));
  check_sound(s);
  EXPECT_EQ(std::count_if(s.gathers.begin(), s.gathers.end(), [](const Gather& g) { return g.weight == 0; }), 1);
  EXPECT_THROW(make_schedule(weights, uses, options_of(199)), UserError);

  weights[0].keep_bytes = 30;  // a copy stays, and the weight is gathered again from it
  s = make_schedule(weights, uses, options_of(230));
  check_sound(s);
  std::vector<bool> from_copy;
  for (const Gather& g : s.gathers) {
    if (g.weight == 0) from_copy.push_back(g.from_copy);
  }
  EXPECT_EQ(from_copy, (std::vector<bool>{false, true})) << to_text(s);
  const auto copy = std::find_if(s.buffers.begin(), s.buffers.end(), [](const auto& b) { return b.is_kept_copy; });
  ASSERT_NE(copy, s.buffers.end());
  EXPECT_EQ((std::vector<int64_t>{copy->first, copy->last, copy->size_bytes}), (std::vector<int64_t>{0, 5, 30}));
}

std::vector<Use> random_uses(std::mt19937& random, int num_weights, int count) {
  std::vector<Use> uses;
  for (int i = 0; i < count; ++i) {
    const Pass pass = std::vector<Pass>{F, Pass::kRecompute, B}[random() % 3];
    Use next{{}, pass, {}, static_cast<int64_t>(random() % 200)};
    for (int w = 0; w < num_weights; ++w) {
      if (random() % num_weights > 1) continue;
      next.weights.push_back(w);
      if (pass == B && random() % 2 == 0) next.gradients.push_back(w);
    }
    uses.push_back(next);
  }
  return uses;
}

TEST(Schedule, RandomStepsAreSound) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const int num_weights = 1 + static_cast<int>(random() % 6);
    std::vector<Weight> weights = equal_weights(num_weights, 0, 0);
    for (Weight& w : weights) {
      w.use_bytes = static_cast<int64_t>(random() % 5000);
      w.gradient_bytes = random() % 3 == 0 ? 0 : w.use_bytes;
      w.gather_ps = static_cast<int64_t>(random() % 300);
      w.reduce_ps = static_cast<int64_t>(random() % 300);
      const unsigned kind = random() % 6;
      w.keep_bytes = kind == 0 ? w.use_bytes : kind == 1 ? w.use_bytes / 3 : 0;
    }
    const std::vector<Use> uses = random_uses(random, num_weights, static_cast<int>(random() % 20));
    const int64_t prefetch = random() % 4;
    const int64_t alignment = random() % 2 == 0 ? 1 : 256;
    const StepSchedule all = make_schedule(weights, uses, options_of(std::nullopt, prefetch, alignment));
    check_sound(all);
    check_reductions(all);
    std::set<int> used;
    for (const Use& u : uses) used.insert(u.weights.begin(), u.weights.end());
    EXPECT_EQ(all.gathers.size(), used.size()) << "without a budget each weight is gathered once";
    for (const Gather& g : all.gathers) {
      EXPECT_TRUE(prefetch == 0 ? g.start == g.needed : g.start < g.needed || g.needed == 0) << to_text(all);
    }
    const int64_t overlapping = overlapping_budget_bytes(weights, uses, options_of(std::nullopt, prefetch, alignment));
    EXPECT_LE(overlapping, all.peak_bytes());
    for (const Gather& g : make_schedule(weights, uses, options_of(overlapping, prefetch, alignment)).gathers) {
      EXPECT_TRUE(prefetch == 0 || g.start < g.needed || g.needed == 0);
    }
    for (int64_t budget = all.peak_bytes(); budget >= 0; budget -= 1 + all.peak_bytes() / 12) {
      try {
        const StepSchedule s = make_schedule(weights, uses, options_of(budget, prefetch, alignment));
        check_sound(s);
        check_reductions(s);
        EXPECT_EQ(predict(s).total_ps, ticked_total(s));
        EXPECT_EQ(to_json(s), to_json(make_schedule(weights, uses, options_of(budget, prefetch, alignment))));
      } catch (const UserError& error) {
        // The budget that the error names works, and so does any larger one.
        const std::string text = error.what();
        const int64_t least = std::stoll(text.substr(text.find("at least ") + 9));
        EXPECT_GT(least, budget);
        check_sound(make_schedule(weights, uses, options_of(least, prefetch, alignment)));
        check_sound(make_schedule(weights, uses, options_of(least + 1, prefetch, alignment)));
        break;
      }
    }
  }
}

TEST(Schedule, TextListsTheEventsOfEachUse) {
  std::vector<Use> uses{use(0, F), use(1, F), use(0, F), use(0, B), use(1, B), use(0, B)};
  uses[3].gradients = {};  // added up until the last use
  uses[4].weights = {1, 0};
  const std::string text = to_text(make_schedule(equal_weights(2, 1024, 1024), uses, options_of(4096)));
  EXPECT_EQ(text,
            "0. forward a; before: gather a, b\n"
            "1. forward b\n"
            "2. forward a (use 2)\n"
            "3. backward a\n"
            "4. backward b, a; after: reduce the gradient of b; after: release b\n"
            "5. backward a (use 2); after: reduce the gradient of a; after: wait for the gradient of b, a; "
            "after: release a\n"
            "6 uses of 2 weights, 2 gathers, 2 reductions\n"
            "peak 4096 B: arena 2048 B of which 2048 B are in use at a time, gradients 2048 B; budget 4096 B\n"
            "  a in uses 0 to 5: 1024 B at 0\n"
            "  b in uses 0 to 4: 1024 B at 1024\n");
  std::vector<Weight> weights = equal_weights(2, 4, 0);
  for (Weight& w : weights) w.gather_ps = 2000000;
  const std::string timed = to_text(make_schedule(weights, {use(0, F, 3000000), use(1, F, 3000000)}, options_of(8)));
  EXPECT_NE(timed.find("predicted 8 us: compute 6 us, transfers 4 us of which 2 us are exposed\n"
                       "  compute, by use      |                  0000"),
            std::string::npos)
      << timed;
}

TEST(Schedule, RejectsInvalidOptions) {
  ScheduleOptions options = options_of(std::nullopt);
  options.gather_until = {0, 0};
  EXPECT_THROW(make_schedule(equal_weights(1, 100, 0), {use(0, F)}, options), UserError);
  options.gather_until = {1};
  EXPECT_THROW(make_schedule(equal_weights(1, 100, 0), {use(0, F)}, options), UserError);
  options.gather_until = {};
  options.held_bytes = -1;
  EXPECT_THROW(make_schedule(equal_weights(1, 100, 0), {use(0, F)}, options), UserError);
}

TEST(Schedule, RejectsInvalidSteps) {
  const std::vector<Weight> weights = equal_weights(1, 8, 8);
  EXPECT_THROW(make_schedule(weights, {use(1, F)}, options_of(std::nullopt)), UserError);
  EXPECT_THROW(make_schedule(weights, {{{0, 0}, F, {}, 0}}, options_of(std::nullopt)), UserError);
  EXPECT_THROW(make_schedule(weights, {use(-1, F)}, options_of(std::nullopt)), UserError);
  EXPECT_THROW(make_schedule(weights, {use(0, F, -1)}, options_of(std::nullopt)), UserError);
  EXPECT_THROW(make_schedule(weights, {use(0, F)}, options_of(-1)), UserError);
  EXPECT_THROW(make_schedule(weights, {use(0, F)}, options_of(std::nullopt, -1)), UserError);
  EXPECT_THROW(make_schedule(weights, {use(0, F)}, options_of(std::nullopt, 1, 3)), UserError);
  EXPECT_THROW(make_schedule({{"a", 0, 8, 9, 0, 0}}, {}, options_of(std::nullopt)), UserError);
  EXPECT_THROW(make_schedule({{"a", -1, 8, 0, 0, 0}}, {}, options_of(std::nullopt)), UserError);
  std::vector<Weight> in_chunks = weights;
  const auto message = [&](const ChunkedReduction& reduction) -> std::string {
    in_chunks[0].in_chunks = reduction;
    try {
      make_schedule(in_chunks, {use(0, F)}, options_of(std::nullopt));
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  };
  const std::string of_weight = " of in_chunks of '" + weights[0].name + "' must be ";
  EXPECT_EQ(message({{{1, 1, 0}}, 2, 8}), "");
  EXPECT_EQ(message({{}, -2, 8}), "weights: rest_ps" + of_weight + "at least 0, got -2");
  EXPECT_EQ(message({{}, 2, -8}), "weights: gradient_bytes" + of_weight + "at least 0, got -8");
  EXPECT_EQ(message({{{1, 1, 0}, {-1, 1, 0}}, 2, 8}), "weights: transfer_ps" + of_weight + "at least 0, got -1");
  EXPECT_EQ(message({{{1, 1, 1}}, 2, 8}),
            "weights: use" + of_weight + "in [-1, 0] (-1: the use that completes the gradient), got 1");
  EXPECT_THROW(parse_pass("sideways"), UserError);
  EXPECT_EQ(parse_pass("recompute"), Pass::kRecompute);
  const StepSchedule empty = make_schedule({}, {}, options_of(0));
  EXPECT_EQ(empty.peak_bytes(), 0);
}

TEST(Arena, BuffersOfOneSizeUseTheLeastMemory) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    std::vector<Lifetime> buffers;
    for (unsigned b = 0; b < 1 + random() % 30; ++b) {
      const auto first = static_cast<int64_t>(random() % 40);
      buffers.push_back({first, first + static_cast<int64_t>(random() % 10), 100});
    }
    const ArenaLayout layout = lay_out(buffers, 64);
    EXPECT_EQ(layout.size_bytes, layout.live_bytes) << "seed " << seed;
    EXPECT_EQ(layout.size_bytes % 128, 0);
  }
}

}  // namespace
}  // namespace shardwright
