// Plans from one mesh to another between cuts of all rules, run on all ranks of both.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "exchange/bounds.h"
#include "layouts.h"
#include "moves/describe.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "search/make_plan.h"
#include "simulate/simulate.h"
#include "support/error.h"

namespace shardwright {
namespace {

class RandomRules {
 public:
  explicit RandomRules(unsigned seed) : random_(seed) {}

  int64_t pick(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random_); }

  // Returns n rows on a mesh of two dims, whose ranks begin at `first` and are in any order.
  Layout layout(int64_t n, int64_t first) {
    const std::vector<int64_t> sizes{pick(2, 3), pick(1, 3)};
    std::vector<int64_t> ranks;
    for (int64_t r = 0; r < sizes[0] * sizes[1]; ++r) ranks.push_back(first + r);
    std::shuffle(ranks.begin(), ranks.end(), random_);
    return test::layout_of(test::mesh_of(sizes, ranks), {n, 2}, first_cut(n, sizes[0]) + "," + any_cut());
  }

 private:
  std::string any_cut() {
    const std::vector<std::string> cuts{"R", "S(0)", concat("Blocks(0,", pick(1, 4), ")"),
                                        concat("Cyclic(0,", pick(1, 4), ")"), "S(1)"};
    return cuts[pick(0, 4)];
  }

  // Includes rules whose sizes add up to all rows.
  std::string first_cut(int64_t n, int64_t k) {
    const std::vector<std::string> cuts{any_cut(), concat("Ragged(0,", sizes(n, k), ")"),
                                        concat("Packed(0,", sizes(n, pick(1, 3)), ")"),
                                        concat("Owned(0,", pick(0, k - 1), ")")};
    return cuts[pick(0, 3)];
  }

  std::string sizes(int64_t n, int64_t count) {
    std::vector<int64_t> sizes(count);
    for (int64_t i = 0; i < n; ++i) ++sizes[pick(0, count - 1)];
    return join(sizes, ":");
  }

  std::mt19937 random_;
};

TEST(TwoMeshesRules, MoveEveryElementAndReachTheBounds) {
  const unsigned seed = 3;
  RandomRules random(seed);
  int64_t plans = 0;
  for (int i = 0; i < 1200; ++i) {
    const int64_t n = random.pick(1, 24);
    const Layout src = random.layout(n, 0);
    const Layout dst = random.layout(n, random.pick(0, 9));
    if (src.mesh() == dst.mesh()) continue;
    const ExchangeBound bound = exchange_bound(src, dst);
    for (const Objective objective : {Objective::kTime, Objective::kBytes}) {
      const Plan plan = make_plan(src, dst, {.lowering = Lowering::kGloo, .objective = objective});
      SCOPED_TRACE(concat("seed ", seed, ", pair ", i, ": ", to_string(plan)));
      simulate(plan);
      ++plans;
      if (objective == Objective::kTime) {
        ASSERT_GE(predicted_picoseconds(plan), least_picoseconds(plan));
        continue;
      }
      const TrafficTotals traffic = totals(plan);
      ASSERT_EQ(traffic.received_bytes_max, bound.received_bytes_max);
      ASSERT_EQ(traffic.received_bytes_sum, bound.received_bytes_sum);
      ASSERT_EQ(traffic.sent_bytes_max, bound.direct_sent_bytes_max);
    }
  }
  EXPECT_GT(plans, 2000);
}

}  // namespace
}  // namespace shardwright
