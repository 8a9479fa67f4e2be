// Compares the bounds of crossings with brute force over all sets of ranks and over single elements.
#include "crossing/bounds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <map>
#include <numeric>
#include <set>

#include "crossing/crossing.h"
#include "layouts.h"
#include "support/error.h"
#include "two_meshes.h"

namespace shardwright {
namespace {

using test::Placed;

constexpr int64_t kItemBytes = 4;

bool less(const Ratio& a, const Ratio& b) { return a.numerator * b.denominator < b.numerator * a.denominator; }
bool same(const Ratio& a, const Ratio& b) { return !less(a, b) && !less(b, a); }

// Returns the maximum, over all sets of workers, of the work that nobody else may do divided by the number of workers.
// Sets are bit masks.
Ratio by_all_sets(const std::map<uint32_t, int64_t>& work, int workers) {
  Ratio most;
  for (uint32_t set = 1; set < 1u << workers; ++set) {
    int64_t amount = 0;
    for (const auto& [mask, one] : work) amount += (mask & ~set) == 0 ? one : 0;
    if (less(most, {amount, std::popcount(set)})) most = {amount, std::popcount(set)};
  }
  return most;
}

TEST(LeastWorstLoad, IsTheDensestSetOfWorkers) {
  std::mt19937 random(11);
  const auto pick = [&](int64_t a, int64_t b) { return std::uniform_int_distribution<int64_t>(a, b)(random); };
  for (int i = 0; i < 2000; ++i) {
    SharedWork work;
    std::vector<uint32_t> team_masks;
    int workers = 0;
    for (int64_t t = 0, teams = pick(1, 5); t < teams; ++t) {
      work.team_sizes.push_back(pick(1, 2));
      team_masks.push_back(((1u << work.team_sizes.back()) - 1) << workers);
      workers += static_cast<int>(work.team_sizes.back());
    }
    std::map<uint32_t, int64_t> masks;
    for (int64_t j = 0, jobs = pick(0, 6); j < jobs; ++j) {
      SharedWork::Job job{pick(0, 20), {}};
      uint32_t mask = 0;
      for (int64_t p = 0, pools = pick(1, 2); p < pools; ++p) {
        job.pools.push_back(static_cast<int>(work.pools.size()));
        work.pools.emplace_back();
        for (size_t t = 0; t < team_masks.size(); ++t) {
          if (pick(0, 2) > 0 && !work.pools.back().empty()) continue;
          work.pools.back().push_back(static_cast<int>(t));
          mask |= team_masks[t];
        }
      }
      work.jobs.push_back(job);
      masks[mask] += job.amount;
    }
    const Ratio load = least_worst_load(work);
    ASSERT_TRUE(same(load, by_all_sets(masks, workers))) << i << ": " << load.numerator << "/" << load.denominator;
  }
}

TEST(CrossingBound, IsWhatSetsOfRanksCannotGoBelow) {
  const unsigned seed = 5;
  test::RandomPlacements random(seed);
  int64_t passing_on_helps = 0;
  for (int i = 0; i < 400; ++i) {
    const std::vector<int64_t> shape = random.shape(6);
    const int64_t world = random.pick(2, 9);
    const Placed src = random.on_any_mesh(shape, world);
    const Placed dst = random.on_any_mesh(shape, world);
    SCOPED_TRACE(concat("seed ", seed, ", pair ", i, ": ", src.layout.to_string(), " -> ", dst.layout.to_string()));
    std::map<int64_t, uint32_t> holders;
    std::map<int64_t, uint32_t> needing;
    uint32_t all = 0;
    for (int64_t r = 0; r < world; ++r) {
      for (const int64_t element : elements_of(src, Rank{r})) holders[element] |= 1u << r;
      for (const int64_t element : elements_of(dst, Rank{r})) needing[element] |= 1u << r;
      if (src.held.contains(Rank{r}) || dst.held.contains(Rank{r})) all |= 1u << r;
    }
    std::vector<int64_t> received(world);
    std::map<uint32_t, int64_t> direct;
    std::map<uint32_t, int64_t> forwarded;
    for (const auto& [element, mask] : needing) {
      const uint32_t needers = mask & ~holders[element];
      if (needers == 0) continue;
      for (int64_t r = 0; r < world; ++r) received[r] += needers >> r & 1u;
      direct[holders[element]] += std::popcount(needers);
      forwarded[holders[element]] += 1;
      forwarded[holders[element] | needers] += std::popcount(needers) - 1;
    }
    const CrossingBound bound = crossing_bound(src.layout, dst.layout);
    ASSERT_EQ(bound.received_bytes_max, *std::max_element(received.begin(), received.end()) * kItemBytes);
    ASSERT_EQ(bound.received_bytes_sum, std::accumulate(received.begin(), received.end(), int64_t{0}) * kItemBytes);
    ASSERT_TRUE(bound.forwarded_is_exact);
    ASSERT_TRUE(same(bound.direct_sent, by_all_sets(direct, static_cast<int>(world))));
    ASSERT_TRUE(same(bound.forwarded_sent, by_all_sets(forwarded, static_cast<int>(world))));
    ASSERT_EQ(bound.direct_sent_bytes_max, bound.direct_sent.rounded_up() * kItemBytes);
    ASSERT_EQ(bound.forwarded_sent_bytes_max, bound.forwarded_sent.rounded_up() * kItemBytes);
    ASSERT_LE(bound.any_sent_bytes_max, bound.forwarded_sent_bytes_max);
    ASSERT_LE(bound.forwarded_sent_bytes_max, bound.direct_sent_bytes_max);
    passing_on_helps += less(bound.forwarded_sent, bound.direct_sent);

    const int64_t node = random.pick(1, 4);
    std::map<int64_t, int64_t> into;
    std::map<int64_t, int64_t> out_of;
    for (const auto& [element, mask] : needing) {
      for (int64_t first = 0; first < world; first += node) {
        const uint32_t ranks = ((1u << node) - 1) << first;
        if ((mask & ranks) != 0 && (holders[element] & ranks) == 0) ++into[first];
        if ((mask & ~ranks) != 0 && (holders[element] & ~ranks) == 0) ++out_of[first];
      }
    }
    int64_t most = 0;
    int64_t most_per_rank = 0;
    for (const auto& [first, elements] : into) {
      const int64_t ranks = std::popcount(((1u << node) - 1) << first & all);
      most = std::max(most, elements);
      most_per_rank = std::max(most_per_rank, (elements + ranks - 1) / ranks);
    }
    int64_t leaving_per_rank = 0;
    for (const auto& [first, elements] : out_of) {
      const int64_t ranks = std::popcount(((1u << node) - 1) << first & all);
      leaving_per_rank = std::max(leaving_per_rank, (elements + ranks - 1) / ranks);
    }
    const CrossingBound nodes = crossing_bound(src.layout, dst.layout, node);
    ASSERT_EQ(nodes.node_bytes_max, most * kItemBytes);
    ASSERT_EQ(nodes.node_bytes_per_rank, most_per_rank * kItemBytes);
    ASSERT_EQ(nodes.leaving_bytes_per_rank, leaving_per_rank * kItemBytes);
  }
  EXPECT_GT(passing_on_helps, 50);
}

// A crossing receives no more than necessary, and no rank sends more than some rank must without forwarding.
TEST(CrossingBound, IsReachedByCrossings) {
  const unsigned seed = 99;
  test::RandomPlacements random(seed);
  for (int i = 0; i < 1000; ++i) {
    const std::vector<int64_t> shape = random.shape(40);
    const Placed src = random.on_any_mesh(shape, 20);
    const Placed dst = random.on_any_mesh(shape, 20);
    const Crossing crossing(src.layout, dst.layout, Sharing::kBytes);
    Traffic most;
    int64_t sum = 0;
    for (const Rank rank : crossing.ranks()) {
      const Traffic one = crossing.at(rank);
      most.received_bytes = std::max(most.received_bytes, one.received_bytes);
      most.sent_bytes = std::max(most.sent_bytes, one.sent_bytes);
      sum += one.received_bytes;
    }
    const CrossingBound bound = crossing_bound(src.layout, dst.layout);
    ASSERT_EQ(most.received_bytes, bound.received_bytes_max) << "seed " << seed << ", pair " << i;
    ASSERT_EQ(sum, bound.received_bytes_sum);
    ASSERT_EQ(most.sent_bytes, bound.direct_sent_bytes_max);
  }
}

// Chooses one of each of some sets so that their union has the fewest ranks, and returns their number.
int64_t smallest_union(const std::vector<uint32_t>& choices, size_t next = 0, uint32_t taken = 0) {
  if (next == choices.size()) return std::popcount(taken);
  if ((choices[next] & taken) != 0) return smallest_union(choices, next + 1, taken);
  int64_t fewest = 64;
  for (uint32_t left = choices[next]; left != 0; left &= left - 1) {
    fewest = std::min(fewest, smallest_union(choices, next + 1, taken | (left & -left)));
  }
  return fewest;
}

// Returns the ranks that have an element, grouped by their coordinates on some mesh dims.
std::vector<uint32_t> choices(const Layout& layout, MeshDimSet apart, int64_t element) {
  std::map<std::vector<int64_t>, uint32_t> ranks;
  for (int64_t p = 0; p < layout.mesh().size(); ++p) {
    const Region region = layout.region(Position{p});
    const bool has = std::any_of(region[0].begin(), region[0].end(),
                                 [&](const Interval& one) { return one.begin <= element && element < one.end; });
    if (!has) continue;
    std::vector<int64_t> coordinates;
    for (const int d : apart.to_vector()) coordinates.push_back(layout.mesh().coordinate(p, d));
    ranks[coordinates] |= 1u << number(Rank{layout.mesh().rank_at(Position{p})});
  }
  std::vector<uint32_t> masks;
  for (const auto& [coordinates, mask] : ranks) masks.push_back(mask);
  return masks;
}

// If there are contributions, each element involves one rank for each of them and one for each replica of the result,
// in the smallest possible set. If there are none, every replica without a holder among its ranks receives it.
TEST(CrossingBound, WithReductionsIsATransferForAllRanksOfAnElementButOne) {
  const std::vector<std::vector<int64_t>> ranks{{0, 1, 2, 3}, {2, 3, 4, 5}, {3, 1, 2, 0}, {4, 5, 6, 7}};
  const auto partial = Placement::partial(ReduceOp::kSum);
  int64_t checked = 0;
  for (size_t pair = 0; pair < ranks.size() * ranks.size(); ++pair) {
    const MeshPtr src_mesh = test::mesh_of({2, 2}, ranks[pair % ranks.size()]);
    const MeshPtr dst_mesh = test::mesh_of({2, 2}, ranks[pair / ranks.size()]);
    for (const Layout& src : test::all_layouts(src_mesh, {5}, {partial})) {
      for (const Layout& dst : test::all_layouts(dst_mesh, {5}, {partial})) {
        if (src.partial_dims().empty() && dst.partial_dims().empty()) continue;
        int64_t transfers = 0;
        for (int64_t element = 0; element < 5; ++element) {
          std::vector<uint32_t> all = choices(dst, dst.replicated_dims(), element);
          const std::vector<uint32_t> contributions = choices(src, src.partial_dims(), element);
          if (contributions.size() == 1) {
            transfers += std::count_if(all.begin(), all.end(), [&](uint32_t m) { return (m & contributions[0]) == 0; });
            continue;
          }
          all.insert(all.end(), contributions.begin(), contributions.end());
          transfers += smallest_union(all) - 1;
        }
        const CrossingBound bound = crossing_bound(src, dst);
        ASSERT_EQ(bound.received_bytes_sum, transfers * kItemBytes) << src.to_string() << " -> " << dst.to_string();
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 1000);
}

// From 1,024 ranks to 2,048, where every part of one side overlaps every part of the other.
TEST(CrossingBound, TakesThousandsOfRanks) {
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < 2048; ++r) ranks.push_back(512 + r);
  const Layout src = test::layout_of(test::mesh_of({1024}), {8192, 4096}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({2048}, ranks), {8192, 4096}, "S(1)");
  const CrossingBound bound = crossing_bound(src, dst, 8);
  EXPECT_EQ(bound.received_bytes_max, 8192 * 2 * 4);
  EXPECT_EQ(bound.direct_sent_bytes_max, 4096 * 8 * 4);
  EXPECT_FALSE(bound.forwarded_is_exact);
  EXPECT_EQ(bound.forwarded_sent_bytes_max, 4096 * 8 * 4);
}

}  // namespace
}  // namespace shardwright
