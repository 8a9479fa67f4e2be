// Compares the bounds of crossings with brute force over all sets of ranks and over single elements.
#include "exchange/bounds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <map>
#include <numeric>
#include <set>

#include "exchange/grid_exchange.h"
#include "indices.h"
#include "layouts.h"
#include "random_pieces.h"
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

TEST(LeastWorstLoad, EqualsTheLoadOfTheDensestSetOfWorkers) {
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
    const Ratio load = min_max_load(work);
    ASSERT_TRUE(same(load, by_all_sets(masks, workers))) << i << ": " << load.numerator << "/" << load.denominator;
  }
}

// The elements that each rank holds.
using Held = std::map<Rank, std::vector<int64_t>>;

Held held_by(const Placed& placed) {
  Held held;
  for (const auto& [rank, lists] : placed.held) held[rank] = elements_of(placed, rank);
  return held;
}

Held held_by(const Layout& layout) {
  Held held;
  for (int64_t p = 0; p < layout.mesh().size(); ++p) {
    std::vector<int64_t>& elements = held[layout.mesh().rank_at(Position{p})];
    for_each_index(layout.region(p), [&](const std::vector<int64_t>& index) {
      int64_t element = 0;
      for (size_t t = 0; t < index.size(); ++t) element = element * layout.shape()[t] + index[t];
      elements.push_back(element);
    });
  }
  return held;
}

// The ranks that hold each element, as bit masks.
struct Holders {
  std::map<int64_t, uint32_t> before;
  std::map<int64_t, uint32_t> after;
  uint32_t all = 0;  // ranks of both meshes
};

Holders holders_of(const Held& src, const Held& dst) {
  Holders holders;
  const auto add = [&](const Held& held, std::map<int64_t, uint32_t>& masks) {
    for (const auto& [rank, elements] : held) {
      holders.all |= 1u << to_int(rank);
      for (const int64_t element : elements) masks[element] |= 1u << to_int(rank);
    }
  };
  add(src, holders.before);
  add(dst, holders.after);
  return holders;
}

void check_ranks(const ExchangeBound& bound, const Holders& holders, int world) {
  std::vector<int64_t> received(world);
  std::map<uint32_t, int64_t> direct;
  std::map<uint32_t, int64_t> forwarded;
  for (const auto& [element, mask] : holders.after) {
    const uint32_t holding = holders.before.at(element);
    const uint32_t receivers = mask & ~holding;
    if (receivers == 0) continue;
    for (int r = 0; r < world; ++r) received[r] += receivers >> r & 1u;
    direct[holding] += std::popcount(receivers);
    forwarded[holding] += 1;
    forwarded[holding | receivers] += std::popcount(receivers) - 1;
  }
  ASSERT_EQ(bound.received_bytes_max, *std::max_element(received.begin(), received.end()) * kItemBytes);
  ASSERT_EQ(bound.received_bytes_sum, std::accumulate(received.begin(), received.end(), int64_t{0}) * kItemBytes);
  ASSERT_TRUE(bound.direct_is_exact);
  ASSERT_TRUE(bound.forwarded_is_exact);
  ASSERT_TRUE(same(bound.direct_sent, by_all_sets(direct, world)));
  ASSERT_TRUE(same(bound.forwarded_sent, by_all_sets(forwarded, world)));
  ASSERT_EQ(bound.direct_sent_bytes_max, bound.direct_sent.rounded_up() * kItemBytes);
  ASSERT_EQ(bound.forwarded_sent_bytes_max, bound.forwarded_sent.rounded_up() * kItemBytes);
  ASSERT_LE(bound.any_sent_bytes_max, bound.forwarded_sent_bytes_max);
  ASSERT_LE(bound.forwarded_sent_bytes_max, bound.direct_sent_bytes_max);
}

// Nodes are `node` consecutive ranks.
void check_nodes(const ExchangeBound& bound, const Holders& holders, int64_t node, int world) {
  std::map<int64_t, int64_t> into;
  std::map<int64_t, int64_t> out_of;
  const auto ranks_of_node = [&](int64_t first) { return ((1u << node) - 1) << first; };
  for (const auto& [element, mask] : holders.after) {
    const uint32_t holding = holders.before.at(element);
    for (int64_t first = 0; first < world; first += node) {
      const uint32_t ranks = ranks_of_node(first);
      if ((mask & ranks) != 0 && (holding & ranks) == 0) ++into[first];
      if ((mask & ~ranks) != 0 && (holding & ~ranks) == 0) ++out_of[first];
    }
  }
  const auto most_per_rank = [&](const std::map<int64_t, int64_t>& by_node) {
    int64_t most = 0;
    for (const auto& [first, elements] : by_node) {
      const int64_t ranks = std::popcount(ranks_of_node(first) & holders.all);
      most = std::max(most, (elements + ranks - 1) / ranks);
    }
    return most;
  };
  int64_t most = 0;
  for (const auto& [first, elements] : into) most = std::max(most, elements);
  ASSERT_EQ(bound.node_bytes_max, most * kItemBytes);
  ASSERT_EQ(bound.node_bytes_per_rank, most_per_rank(into) * kItemBytes);
  ASSERT_EQ(bound.leaving_bytes_per_rank, most_per_rank(out_of) * kItemBytes);
}

TEST(ExchangeBound, MatchesBruteForceOverSetsOfRanks) {
  const unsigned seed = 5;
  test::RandomPlacements random(seed);
  int64_t passing_on_helps = 0;
  for (int i = 0; i < 400; ++i) {
    const std::vector<int64_t> shape = random.shape(6);
    const auto world = static_cast<int>(random.pick(2, 9));
    const Placed src = random.on_any_mesh(shape, world);
    const Placed dst = random.on_any_mesh(shape, world);
    SCOPED_TRACE(concat("seed ", seed, ", pair ", i, ": ", src.layout.to_string(), " -> ", dst.layout.to_string()));
    const Holders holders = holders_of(held_by(src), held_by(dst));
    const ExchangeBound bound = exchange_bound(src.layout, dst.layout);
    check_ranks(bound, holders, world);
    passing_on_helps += less(bound.forwarded_sent, bound.direct_sent);
    const int64_t node = random.pick(1, 4);
    check_nodes(exchange_bound(src.layout, dst.layout, node), holders, node, world);
    ASSERT_FALSE(HasFatalFailure());
  }
  EXPECT_GT(passing_on_helps, 50);
}

// The same comparison for pieces, of which several coordinates may hold an element.
TEST(ExchangeBound, OfPiecesMatchesBruteForceOverSetsOfRanks) {
  const unsigned seed = 6;
  test::RandomPieces random(seed);
  int64_t above_the_mean = 0;
  for (int i = 0; i < 200; ++i) {
    const int64_t rows = random.pick(1, 12);
    const Layout src = random.layout(rows);
    const Layout dst = random.layout(rows);
    SCOPED_TRACE(concat("seed ", seed, ", pair ", i, ": ", src.to_string(), " -> ", dst.to_string()));
    const Holders holders = holders_of(held_by(src), held_by(dst));
    const ExchangeBound bound = exchange_bound(src, dst);
    check_ranks(bound, holders, 11);
    above_the_mean += less({bound.received_bytes_sum / kItemBytes, src.mesh().size()}, bound.direct_sent);
    const int64_t node = random.pick(1, 4);
    check_nodes(exchange_bound(src, dst, node), holders, node, 11);
    ASSERT_FALSE(HasFatalFailure());
  }
  EXPECT_GT(above_the_mean, 50);
}

// A crossing receives no more than necessary, and no rank sends more than some rank must without forwarding.
TEST(ExchangeBound, IsReachedByCrossings) {
  const unsigned seed = 99;
  test::RandomPlacements random(seed);
  for (int i = 0; i < 1000; ++i) {
    const std::vector<int64_t> shape = random.shape(40);
    const Placed src = random.on_any_mesh(shape, 20);
    const Placed dst = random.on_any_mesh(shape, 20);
    const GridExchange crossing(src.layout, dst.layout, ReplicaPolicy::kEvenBytes);
    Traffic most;
    int64_t sum = 0;
    for (const Rank rank : crossing.ranks()) {
      const Traffic one = crossing.traffic(rank);
      most.received_bytes = std::max(most.received_bytes, one.received_bytes);
      most.sent_bytes = std::max(most.sent_bytes, one.sent_bytes);
      sum += one.received_bytes;
    }
    const ExchangeBound bound = exchange_bound(src.layout, dst.layout);
    ASSERT_EQ(most.received_bytes, bound.received_bytes_max) << "seed " << seed << ", pair " << i;
    ASSERT_EQ(sum, bound.received_bytes_sum);
    ASSERT_EQ(most.sent_bytes, bound.direct_sent_bytes_max);
  }
}

// Chooses one mask of each list so that their union has the fewest ranks, and returns that number of ranks.
int64_t smallest_union(const std::vector<uint32_t>& choices, size_t next = 0, uint32_t taken = 0) {
  if (next == choices.size()) return std::popcount(taken);
  if ((choices[next] & taken) != 0) return smallest_union(choices, next + 1, taken);
  int64_t fewest = 64;
  for (uint32_t left = choices[next]; left != 0; left &= left - 1) {
    fewest = std::min(fewest, smallest_union(choices, next + 1, taken | (left & -left)));
  }
  return fewest;
}

// Returns the ranks that hold an element, grouped by their coordinates on the mesh dims in `apart`.
std::vector<uint32_t> choices(const Layout& layout, MeshDimSet apart, int64_t element) {
  std::map<std::vector<int64_t>, uint32_t> ranks;
  for (int64_t p = 0; p < layout.mesh().size(); ++p) {
    const Region region = layout.region(Position{p});
    const bool has = std::any_of(region[0].begin(), region[0].end(),
                                 [&](const Interval& one) { return one.begin <= element && element < one.end; });
    if (!has) continue;
    std::vector<int64_t> coordinates;
    for (const int d : apart.to_vector()) coordinates.push_back(layout.mesh().coordinate(p, d));
    ranks[coordinates] |= 1u << to_int(Rank{layout.mesh().rank_at(Position{p})});
  }
  std::vector<uint32_t> masks;
  for (const auto& [coordinates, mask] : ranks) masks.push_back(mask);
  return masks;
}

// With contributions, each element involves one rank per contribution and one per replica of the result, in the
// smallest possible set. Without contributions, every replica receives the element unless one of its ranks holds it.
TEST(ExchangeBound, WithReductionsIsATransferPerInvolvedRankButOne) {
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
        const ExchangeBound bound = exchange_bound(src, dst);
        ASSERT_EQ(bound.received_bytes_sum, transfers * kItemBytes) << src.to_string() << " -> " << dst.to_string();
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 1000);
}

// From 1,024 ranks to 2,048, where every part of one side overlaps every part of the other.
TEST(ExchangeBound, SupportsThousandsOfRanks) {
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < 2048; ++r) ranks.push_back(512 + r);
  const Layout src = test::layout_of(test::mesh_of({1024}), {8192, 4096}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({2048}, ranks), {8192, 4096}, "S(1)");
  const ExchangeBound bound = exchange_bound(src, dst, 8);
  EXPECT_EQ(bound.received_bytes_max, 8192 * 2 * 4);
  EXPECT_EQ(bound.direct_sent_bytes_max, 4096 * 8 * 4);
  EXPECT_FALSE(bound.forwarded_is_exact);
  EXPECT_EQ(bound.forwarded_sent_bytes_max, 4096 * 8 * 4);
}

}  // namespace
}  // namespace shardwright
