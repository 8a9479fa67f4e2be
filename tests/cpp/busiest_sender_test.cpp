// What the busiest rank sends, next to the least that it could, over random pairs of meshes and layouts.
//
// SHARDWRIGHT_PAIRS=1000 tries so many pairs; by default a part of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "crossing/bounds.h"
#include "moves/describe.h"
#include "moves/figures.h"
#include "moves/traffic.h"
#include "search/make_plan.h"
#include "support/error.h"
#include "support/text.h"
#include "two_meshes.h"

namespace shardwright {
namespace {

int64_t number_of_pairs() {
  const char* given = std::getenv("SHARDWRIGHT_PAIRS");
  return given != nullptr ? std::stoll(given) : 120;
}

// One node whose messages cost next to nothing, so that plans for time are those for the busiest link.
Topology bytes_alone() {
  Topology topology{"bytes alone", 0, 1, 0, {1, 5120}, {1, 5120}, {}};
  topology.check();
  return topology;
}

// Calls check(src, dst) for layouts on two meshes; `size` draws the size of a tensor dim.
void for_random_pairs(unsigned seed, const std::function<int64_t(test::RandomPlacements&)>& size,
                      const std::function<void(const Layout&, const Layout&)>& check) {
  test::RandomPlacements random(seed);
  for (int64_t tried = 0, pairs = number_of_pairs(); tried < pairs;) {
    std::vector<int64_t> shape;
    for (int64_t t = 0, ndim = random.pick(1, 3); t < ndim; ++t) shape.push_back(size(random));
    const Layout src = random.on_any_mesh(shape, 16).layout;
    const Layout dst = random.on_any_mesh(shape, 16).layout;
    if (src.mesh() == dst.mesh()) continue;
    SCOPED_TRACE(concat("seed ", seed, ", pair ", tried++, ": ", src.to_string(), " -> ", dst.to_string()));
    check(src, dst);
  }
}

double over(int64_t value, int64_t bound) {
  return bound == 0 ? 1 : static_cast<double>(value) / static_cast<double>(bound);
}

// A crossing alone is within 5% of the bound without forwarding. Most plans for time, whose ranks may gather what has
// crossed, are within 5% of the bound with forwarding. In the others, of tensors that do not go in segments, a rank
// that holds some of the source also passes on a full share. The steps are taken one after the other, so this is
// faster, and costs the rank more bytes than the least (docs/architecture.md, "From one mesh to another").
TEST(BusiestSender, IsCloseToTheLeastPossible) {
  int64_t tried = 0;
  int64_t within = 0;
  double worst = 1;
  const auto any_size = [](test::RandomPlacements& random) { return random.pick(60, 400); };
  const auto check = [&](const Layout& src, const Layout& dst) {
    ++tried;
    const CrossingBound bound = crossing_bound(src, dst);
    const Plan straight = make_plan(src, dst, {.objective = Objective::kBytes});
    const int64_t direct = std::max(bound.received_bytes_max, bound.direct_sent_bytes_max);
    ASSERT_LE(over(totals(straight).sent_bytes_max, direct), 1.05);
    const Plan fastest = make_plan(src, dst, {.topology = bytes_alone()});
    const int64_t forwarded = std::max(bound.received_bytes_max, bound.forwarded_sent_bytes_max);
    const double ratio = over(totals(fastest).sent_bytes_max, forwarded);
    within += ratio <= 1.05;
    if (ratio > 1.05 && std::getenv("SHARDWRIGHT_PAIRS") != nullptr) {
      std::printf("%.3f of %s\n%s\n", ratio, bytes_text(forwarded).c_str(), to_string(fastest).c_str());
    }
    worst = std::max(worst, ratio);
  };
  for_random_pairs(41, any_size, check);
  std::printf("%lld of %lld pairs within 5%% of the bound with forwarding, the worst at %.2f of it\n",
              static_cast<long long>(within), static_cast<long long>(tried), worst);
  EXPECT_GE(within * 100, tried * 85);
}

// The same for tensors that may go in segments. While one segment crosses, others are gathered, so a plan takes as long
// as its busiest rank, and longer by the share of a segment for each of its steps.
TEST(BusiestSender, DecidesHowLongSegmentsTake) {
  int64_t tried = 0;
  int64_t within = 0;
  int64_t in_segments = 0;
  double worst = 1;
  const auto many_divisors = [](test::RandomPlacements& random) { return 576 * random.pick(1, 2); };
  const auto check = [&](const Layout& src, const Layout& dst) {
    ++tried;
    const CrossingBound bound = crossing_bound(src, dst);
    const Plan fastest = make_plan(src, dst, {.topology = bytes_alone()});
    const int64_t forwarded = std::max(bound.received_bytes_max, bound.forwarded_sent_bytes_max);
    const auto depth = static_cast<double>(fastest.steps.size());
    const double allowed = fastest.segments.count > 1 ? 1 + depth / static_cast<double>(fastest.segments.count) : 1;
    const double ratio = over(predicted_picoseconds(fastest), scaled(forwarded, 5120)) / allowed;
    in_segments += fastest.segments.count > 1;
    within += ratio <= 1.05;
    if (ratio > 1.05 && std::getenv("SHARDWRIGHT_PAIRS") != nullptr) {
      std::printf("%.3f, sends %.3f of %s\n%s\n", ratio, over(totals(fastest).sent_bytes_max, forwarded),
                  bytes_text(forwarded).c_str(), to_string(fastest).c_str());
    }
    worst = std::max(worst, ratio);
  };
  for_random_pairs(43, many_divisors, check);
  std::printf("%lld of %lld pairs within 5%% of the bound with forwarding, the worst at %.2f of it, %lld in segments\n",
              static_cast<long long>(within), static_cast<long long>(tried), worst,
              static_cast<long long>(in_segments));
  EXPECT_GE(within * 100, tried * 95);
}

}  // namespace
}  // namespace shardwright
