// Compares the bytes that the busiest rank sends with the lower bound, for random pairs of meshes and layouts.
//
// SHARDWRIGHT_PAIRS=5000 tries 5,000 pairs instead of 1,000, and prints the plans above 5%.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "exchange/bounds.h"
#include "layouts.h"
#include "moves/describe.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "search/make_plan.h"
#include "support/error.h"
#include "support/text.h"
#include "two_mesh_plans.h"
#include "two_meshes.h"

namespace shardwright {
namespace {

int64_t number_of_pairs() {
  const char* given = std::getenv("SHARDWRIGHT_PAIRS");
  return given != nullptr ? std::stoll(given) : 1000;
}

// One node whose messages cost next to nothing, so that the fastest plan is the one with the fewest bytes on the
// busiest link.
Topology topology_of_bytes_only() {
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

int64_t any_size(test::RandomPlacements& random) { return random.pick(60, 400); }
int64_t many_divisors(test::RandomPlacements& random) { return 576 * random.pick(1, 2); }

// Counts the pairs within 5% of a bound, and keeps the worst ratio.
class Ratios {
 public:
  explicit Ratios(std::string what) : what_(std::move(what)) {}

  // Prints plans above 5% if SHARDWRIGHT_PAIRS is set.
  void add(double ratio, const Plan& plan) {
    ++tried_;
    within_ += ratio <= 1.05;
    worst_ = std::max(worst_, ratio);
    in_segments_ += plan.segments.count > 1;
    if (ratio > 1.05 && std::getenv("SHARDWRIGHT_PAIRS") != nullptr) {
      std::printf("%s: %.3f\n%s\n", what_.c_str(), ratio, to_string(plan).c_str());
    }
  }

  void expect_within(double share) const {
    std::printf("%s: %lld of %lld pairs within 5%%, the worst at %.2f, %lld in segments\n", what_.c_str(),
                static_cast<long long>(within_), static_cast<long long>(tried_), worst_,
                static_cast<long long>(in_segments_));
    EXPECT_GE(static_cast<double>(within_), static_cast<double>(tried_) * share);
  }

 private:
  std::string what_;
  int64_t tried_ = 0;
  int64_t within_ = 0;
  int64_t in_segments_ = 0;
  double worst_ = 1;
};

int64_t min_sent_bytes(const ExchangeBound& bound) {
  return std::max(bound.received_bytes_max, bound.forwarded_sent_bytes_max);
}

// A crossing alone is within 5% of the bound without forwarding. In most plans for time, ranks may gather what has
// crossed, and the busiest rank is within 5% of the bound with forwarding; all are within 1 + steps / segments of it.
// The others are of tensors too small for many segments, where a rank that holds some of the source also forwards a
// full share. Its steps run one after the other, so this is faster, and costs the rank more bytes than the minimum
// (docs/architecture/exchange.md, "From one mesh to another").
TEST(BusiestSender, IsCloseToTheLowerBound) {
  Ratios ratios("bytes sent");
  for_random_pairs(41, any_size, [&](const Layout& src, const Layout& dst) {
    const ExchangeBound bound = exchange_bound(src, dst);
    const Plan straight = make_plan(src, dst, {.objective = Objective::kBytes});
    const int64_t direct = std::max(bound.received_bytes_max, bound.direct_sent_bytes_max);
    ASSERT_LE(over(totals(straight).sent_bytes_max, direct), 1.05);
    const Plan fastest = make_plan(src, dst, {.topology = topology_of_bytes_only()});
    const double ratio = over(totals(fastest).sent_bytes_max, min_sent_bytes(bound));
    const auto depth = static_cast<double>(fastest.steps.size());
    ASSERT_LE(ratio, 1 + depth / static_cast<double>(fastest.segments.count)) << to_string(fastest);
    ratios.add(ratio, fastest);
  });
  ratios.expect_within(0.985);
}

// Ranks that need the same two runs of columns split them into stripes of any lengths, as pieces.
TEST(BusiestSender, SplitsPartsOfSeveralRunsIntoStripes) {
  const std::vector<int64_t> shape{27, 20, 71};
  int64_t in_pieces = 0;
  for (const auto& ranks : std::vector<std::vector<int64_t>>{{0, 1, 2}, {0, 2, 4}, {0, 3, 4}, {1, 6, 9}, {2, 7, 8}}) {
    const Layout src = test::layout_of(test::mesh_of({3}, ranks), shape, "S(2)");
    const Layout dst = test::layout_of(test::mesh_of({4, 2}), shape, "R,SS(2,2)");
    const Plan plan = make_plan(src, dst, {.topology = topology_of_bytes_only()});
    SCOPED_TRACE(to_string(plan));
    test::expect_as_predicted(plan);
    if (to_string(plan).find("Pieces(2,") == std::string::npos) continue;
    ++in_pieces;
    EXPECT_LE(over(totals(plan).sent_bytes_max, min_sent_bytes(exchange_bound(src, dst))), 1.1);
  }
  EXPECT_GE(in_pieces, 1);
}

// While one segment crosses, others are gathered. So a plan takes as long as its busiest rank, plus the share of a
// segment for each of its steps.
void expect_time_of_busiest(unsigned seed, const std::function<int64_t(test::RandomPlacements&)>& size, double share) {
  Ratios ratios("predicted time");
  for_random_pairs(seed, size, [&](const Layout& src, const Layout& dst) {
    const Plan fastest = make_plan(src, dst, {.topology = topology_of_bytes_only()});
    const auto depth = static_cast<double>(fastest.steps.size());
    const double allowed = fastest.segments.count > 1 ? 1 + depth / static_cast<double>(fastest.segments.count) : 1;
    const int64_t least = picoseconds_for(min_sent_bytes(exchange_bound(src, dst)), 5120);
    ratios.add(over(predicted_picoseconds(fastest), least) / allowed, fastest);
  });
  ratios.expect_within(share);
}

TEST(BusiestSender, DeterminesTheTimeOfUniformSegments) { expect_time_of_busiest(43, many_divisors, 0.985); }

TEST(BusiestSender, DeterminesTheTimeOfNonUniformSegments) { expect_time_of_busiest(41, any_size, 0.985); }

}  // namespace
}  // namespace shardwright
