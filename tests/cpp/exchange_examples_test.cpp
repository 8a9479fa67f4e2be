// The worked examples in the headers of csrc/exchange.
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "exchange/axes.h"
#include "exchange/axis_overlap.h"
#include "exchange/bounds.h"
#include "exchange/cells.h"
#include "exchange/digits.h"
#include "exchange/grid.h"
#include "exchange/indexed_exchange.h"
#include "exchange/load.h"
#include "exchange/mesh_exchange.h"
#include "exchange/nearest.h"
#include "exchange/samples.h"
#include "layouts.h"

namespace shardwright {
namespace {

using Lists = std::vector<IntervalList>;
using Sizes = std::map<std::pair<int64_t, int64_t>, int64_t>;  // elements by sender and receiver

// Returns a layout of the first tensor dim whose coordinates hold these intervals.
Layout layout_of_pieces(const MeshPtr& mesh, int64_t n, const std::vector<std::vector<Interval>>& lists) {
  return Layout(mesh, {n}, DType::parse("float32"), {Placement::cut(0, CutRule::pieces(lists))});
}

Sizes sizes_of(const Exchange& exchange) {
  Sizes sizes;
  for (const Rank from : exchange.ranks()) {
    for (const auto& [to, elements] : exchange.message_sizes(from, Direction::kSend)) {
      sizes[{to_int(from), to_int(to)}] = elements;
    }
  }
  return sizes;
}

TEST(ExchangeExamples, Axes) {
  const MeshPtr mesh = test::mesh_of({2});
  const DType dtype = DType::parse("float32");
  const Layout src(mesh, {4, 6, 8}, dtype, parse_placements("Ragged(0,10:14)"), {}, StridedMeaning::kAuto, 2);
  const Layout dst(mesh, {4, 6, 8}, dtype, parse_placements("S(1)"));
  const AxisGrids grids = axis_grids(src, dst);
  EXPECT_EQ(grids.src.axes[0].lists, (Lists{{{0, 10}}, {{10, 24}}}));
  EXPECT_EQ(grids.dst.axes[0].lists,
            (Lists{{{0, 3}, {6, 9}, {12, 15}, {18, 21}}, {{3, 6}, {9, 12}, {15, 18}, {21, 24}}}));
  EXPECT_EQ(grids.src.axes[1].lists, (Lists{{{0, 8}}}));
}

TEST(ExchangeExamples, AxesOfAnIndexMap) {
  const MeshPtr mesh = test::mesh_of({2});
  const DType dtype = DType::parse("float32");
  const Layout src(mesh, {4, 6}, dtype, parse_placements("S(0)"), {}, StridedMeaning::kAuto, 2);
  const Layout dst(mesh, {4, 4}, dtype, parse_placements("S(0)"));
  const AxisGrids grids = axis_grids(src, dst, IndexMap({{0, 0, 0, 0, 4}, {1, 1, 4, 2, 2}}));
  ASSERT_EQ(grids.src.axes.size(), 1u);
  EXPECT_EQ(grids.src.axes[0].lists[0], (IntervalList{{0, 4}}));
  EXPECT_EQ(grids.src.axes[0].local_lists[0], (IntervalList{{8, 12}, {0, 2}, {14, 18}, {2, 4}}));
}

TEST(ExchangeExamples, AxisOverlap) {
  const MeshPtr mesh = test::mesh_of({2, 2});
  const Layout layout = test::layout_of(mesh, {12}, "S(0),S(0)");
  const auto visits = [&](MeshDimSet varying, int64_t position) {
    std::vector<std::pair<int64_t, int64_t>> all;
    for_each_overlap(*mesh, 12, layout.cuts(0), position, varying, {{2, 10}},
                     [&](int64_t elements, int64_t times) { all.emplace_back(elements, times); });
    return all;
  };
  using Visits = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(visits(MeshDimSet::from_bits(3), 0), (Visits{{1, 1}, {3, 1}, {3, 1}, {1, 1}}));
  EXPECT_EQ(visits(MeshDimSet::single(1), 2), (Visits{{3, 1}, {1, 1}}));
}

TEST(ExchangeExamples, Bound) {
  const Layout src = test::layout_of(test::mesh_of({2}), {12}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({3}, {2, 3, 4}), {12}, "R");
  const ExchangeBound bound = exchange_bound(src, dst);
  EXPECT_EQ(bound.received_bytes_max, 12 * 4);
  EXPECT_EQ(bound.received_bytes_sum, 36 * 4);
  EXPECT_EQ(bound.direct_sent, (Ratio{18, 1}));
  EXPECT_EQ(bound.forwarded_sent, (Ratio{36, 5}));
  EXPECT_EQ(bound.any_sent_bytes_max, 8 * 4);
}

TEST(ExchangeExamples, Cells) {
  const Layout src = layout_of_pieces(test::mesh_of({2}), 8, {{{0, 8}}, {{0, 4}}});
  const Layout dst = test::layout_of(test::mesh_of({2}, {2, 3}), {8}, "S(0)");
  const AxisGrids grids = axis_grids(src, dst);
  const std::optional<Cells> cells = Cells::of(grids.src, grids.dst, ranks_of(src.mesh(), dst.mesh()));
  ASSERT_TRUE(cells.has_value());
  ASSERT_EQ(cells->all().size(), 2u);
  EXPECT_EQ(cells->direct_load(), (Ratio{4, 1}));
  using Shares = std::vector<std::vector<std::pair<size_t, int64_t>>>;
  EXPECT_EQ(cells->direct_shares(4), (Shares{{{1, 4}}, {{0, 4}}}));
}

TEST(ExchangeExamples, Digits) {
  const MeshPtr mesh = test::mesh_of({2, 4});
  const Layout before = test::layout_of(mesh, {12}, "S(0),R");
  const Layout after = test::layout_of(mesh, {12}, "R,S(0)");
  const auto matching = Matching::of_cuts(*mesh, 12, before.cuts(0), after.cuts(0));
  ASSERT_TRUE(matching.has_value());
  ASSERT_EQ(matching->digits().size(), 2u);
  EXPECT_EQ(matching->digits()[0].before.mesh_dim, -1);
  EXPECT_EQ(matching->digits()[0].after, (Matching::Owner{1, 1}));
  EXPECT_EQ(matching->digits()[1].before, (Matching::Owner{0, 1}));
  EXPECT_EQ(matching->digits()[1].after, (Matching::Owner{1, 2}));
  EXPECT_TRUE(matching->digits()[1].is_tie());
  EXPECT_EQ(matching->elements_per_overlap(), 3);
}

TEST(ExchangeExamples, ShardOverlaps) {
  const ShardOverlaps overlaps({{{0, 6}}, {{6, 12}}}, {{{0, 4}}, {{4, 8}}, {{8, 12}}});
  const auto numbers = [](std::span<const ShardOverlaps::Overlap> entries) {
    std::vector<std::vector<int64_t>> all;
    for (const auto& [shard, elements, before, index] : entries) all.push_back({shard, elements, before, index});
    return all;
  };
  using Numbers = std::vector<std::vector<int64_t>>;
  EXPECT_EQ(numbers(overlaps.of_src(0)), (Numbers{{0, 4, 0, 0}, {1, 2, 4, 0}}));
  EXPECT_EQ(numbers(overlaps.of_dst(1)), (Numbers{{0, 2, 0, 1}, {1, 2, 2, 0}}));
}

TEST(ExchangeExamples, Rearrangement) {
  const Layout src = layout_of_pieces(test::mesh_of({2}), 12, {{{6, 12}, {0, 6}}, {{0, 12}}});
  const Layout dst = test::layout_of(test::mesh_of({3}, {4, 5, 6}), {12}, "S(0)");
  EXPECT_EQ(sizes_of(IndexedExchange(src, dst, ReplicaPolicy::kWholeMessages)),
            (Sizes{{{0, 4}, 4}, {{1, 5}, 4}, {{0, 6}, 4}}));
  EXPECT_EQ(sizes_of(IndexedExchange(src, dst, ReplicaPolicy::kEvenBytes)),
            (Sizes{{{0, 4}, 2}, {{0, 5}, 2}, {{0, 6}, 2}, {{1, 4}, 2}, {{1, 5}, 2}, {{1, 6}, 2}}));
}

TEST(ExchangeExamples, Load) {
  const SharedWork work{{{6, {0}}, {6, {0, 1}}}, {{0}, {1}}, {1, 2}};
  EXPECT_EQ(min_max_load(work), (Ratio{6, 1}));
}

TEST(ExchangeExamples, MeshExchange) {
  const MeshPtr mesh = test::mesh_of({4});
  const Layout before = test::layout_of(mesh, {8, 8}, "S(0)");
  const Layout after = test::layout_of(mesh, {8, 8}, "S(1)");
  const MeshExchange exchange(before, after, MeshDimSet::single(0));
  EXPECT_TRUE(exchange.is_regular_and_full());
  const Extent extent = exchange.transfer(exchange.group(1), 1, 3).in_round(0);
  EXPECT_EQ(extent.count, 4);
  EXPECT_EQ(extent.first_held, 6);
  EXPECT_EQ(extent.first_needed, 4);
  EXPECT_FALSE(extent.is_contiguous_held);
  EXPECT_TRUE(extent.is_contiguous_needed);
}

TEST(ExchangeExamples, MessageClasses) {
  const MeshPtr mesh = test::mesh_of({4});
  const Layout before = test::layout_of(mesh, {10}, "S(0)");
  const Layout after = test::layout_of(mesh, {10}, "R");
  const MeshExchange exchange(before, after, MeshDimSet::single(0));
  std::vector<std::pair<int64_t, int64_t>> classes;
  for (const auto& [transfer, times] : exchange.message_classes(exchange.group(0), 0, Direction::kReceive)) {
    classes.emplace_back(times, transfer.count());
  }
  EXPECT_EQ(classes, (std::vector<std::pair<int64_t, int64_t>>{{3, 3}, {1, 1}, {-1, 3}}));
}

TEST(ExchangeExamples, SharedSending) {
  const MeshPtr mesh = test::mesh_of({2, 2});
  const Layout before = test::layout_of(mesh, {12}, "S(0),R");
  const Layout after = test::layout_of(mesh, {12}, "R,S(0)");
  const auto range = [&](ReplicaPolicy policy, size_t from) {
    return SharedSending(before, after, MeshDimSet::from_bits(3), policy, {0, 1, 2, 3}).range(from, 2);
  };
  EXPECT_EQ(range(ReplicaPolicy::kWholeMessages, 0), (Interval{0, 6}));
  EXPECT_EQ(range(ReplicaPolicy::kWholeMessages, 1).extent(), 0);
  EXPECT_EQ(range(ReplicaPolicy::kEvenBytes, 0), (Interval{0, 3}));
  EXPECT_EQ(range(ReplicaPolicy::kEvenBytes, 1), (Interval{3, 6}));
}

TEST(ExchangeExamples, NearestCut) {
  const Layout src = layout_of_pieces(test::mesh_of({3}, {0, 1, 3}), 6, {{{0, 4}}, {{0, 2}}, {{4, 6}}});
  const NearestCut cut = nearest_cut(src, {Rank{0}, Rank{1}, Rank{2}});
  EXPECT_EQ(cut.lists, (std::vector<std::vector<Interval>>{{{2, 4}}, {{0, 2}}, {{4, 6}}}));
}

TEST(ExchangeExamples, Samples) {
  const auto parts_of = [](const char* placement) {
    const Layout layout = test::layout_of(test::mesh_of({2}), {100}, placement);
    return Lists{layout.part(0, 0), layout.part(0, 1)};
  };
  const Lists before = parts_of("Cyclic(0,2)");
  const Lists after = parts_of("Cyclic(0,3)");
  const Samples samples({&before, &after});
  std::vector<std::pair<Interval, int64_t>> found;
  for (const auto& [first, count] : samples.all()) found.emplace_back(first, count);
  EXPECT_EQ(found, (std::vector<std::pair<Interval, int64_t>>{{{0, 3}, 1}, {{3, 15}, 7}, {{87, 100}, 1}}));
}

TEST(ExchangeExamples, SampleRanges) {
  const Lists lists{{{0, 6}}, {{4, 8}}};
  std::vector<std::pair<Interval, std::vector<int64_t>>> ranges;
  for (const SampleRange& range : sample_ranges(Samples({&lists}), {&lists[0], &lists[1]})) {
    ranges.emplace_back(range.interval, range.lists);
  }
  EXPECT_EQ(ranges,
            (std::vector<std::pair<Interval, std::vector<int64_t>>>{{{0, 4}, {0}}, {{4, 6}, {0, 1}}, {{6, 8}, {1}}}));
}

}  // namespace
}  // namespace shardwright
