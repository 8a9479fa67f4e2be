// Plans between two meshes whose tensor is sent in segments: every element, received bytes, memory and times.
#include "moves/segments.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "exchange/bounds.h"
#include "layouts.h"
#include "moves/describe.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "planning/memory_limit.h"
#include "planning/serialize.h"
#include "program/memory.h"
#include "program/program.h"
#include "program/transfer_traffic.h"
#include "search/make_plan.h"
#include "simulate/simulate.h"
#include "support/error.h"
#include "two_mesh_plans.h"
#include "two_meshes.h"

namespace shardwright {
namespace {

using test::ranks_from;
using test::with_nodes;

// The example in the header.
TEST(InSegments, AreRangesOfBlocks) {
  const Layout src = test::layout_of(test::mesh_of({4}), {16}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({2}, {4, 5}), {16}, "S(0)");
  Plan plan = plan_through({src, dst}, {});
  EXPECT_EQ(block_length(plan, 0), 4);
  plan.segments = {0, 2};
  EXPECT_TRUE(can_run_in_segments(plan, plan.segments));
  EXPECT_TRUE(are_uniform(plan));
  EXPECT_FALSE(can_run_in_segments(plan, {1, 2}));
  ASSERT_EQ(plans_of_segments(plan).size(), 1u);
  EXPECT_EQ(plans_of_segments(plan).front().src.shape(), std::vector<int64_t>{8});
  EXPECT_EQ(plans_of_segments(plan).front().dst.region(1), (Region{{{4, 8}}}));
  simulate(plan);
  // Uneven parts, of 6, 6 and 4 rows, are made of blocks of 2.
  const Layout three = test::layout_of(test::mesh_of({3}, {4, 5, 6}), {16}, "S(0)");
  Plan uneven = plan_through({src, three}, {});
  EXPECT_EQ(block_length(uneven, 0), 2);
  uneven.segments = {0, 2};
  simulate(uneven);
  EXPECT_EQ(to_bytes(from_bytes(to_bytes(uneven))), to_bytes(uneven));
  // Uneven parts that are cut again have no blocks.
  const Layout again = test::layout_of(test::mesh_of({3, 2}, ranks_from(4, 6)), {16}, "S(0),S(0)");
  EXPECT_EQ(block_length(plan_through({src, again}, {}), 0), 0);
}

// The other example in the header.
TEST(InSegments, MayBeNonUniform) {
  const Layout src = test::layout_of(test::mesh_of({2}), {7}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({3}, {2, 3, 4}), {7}, "S(0)");
  Plan plan = plan_through({src, dst}, {});
  plan.segments = {0, 2};
  ASSERT_TRUE(can_run_in_segments(plan, plan.segments));
  EXPECT_FALSE(are_uniform(plan));
  const std::vector<Plan> segments = plans_of_segments(plan);
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_EQ(segments[0].src.region(0), (Region{{{0, 2}}}));
  EXPECT_EQ(segments[0].src.region(1), (Region{{{4, 5}, {6, 7}}}));
  EXPECT_EQ(segments[0].dst.region(1), (Region{{{4, 5}}}));
  EXPECT_EQ(segments[1].src.region(1), (Region{{{5, 6}}}));
  EXPECT_EQ(segments[1].dst.region(0), (Region{{{2, 3}}}));
  EXPECT_EQ(segments[1].dst.region(2), (Region{{}}));
  simulate(plan);
  EXPECT_EQ(to_bytes(from_bytes(to_bytes(plan))), to_bytes(plan));
}

// Every index is in one segment. For each run of indices of a part, the sizes of its shares in the segments differ by
// at most one.
TEST(InSegments, HaveEqualSharesOfEveryRun) {
  const unsigned seed = 37;
  test::RandomPlacements random(seed);
  for (int i = 0; i < 60; ++i) {
    const std::vector<int64_t> shape{random.pick(1, 60)};
    const Layout src = random.on_any_mesh(shape, 12).layout;
    const Layout dst = random.on_any_mesh(shape, 12).layout;
    if (src.mesh() == dst.mesh()) continue;
    Plan plan = plan_through({src, dst}, {});
    plan.segments = {0, random.pick(2, 9)};
    if (!can_run_in_segments(plan, plan.segments) || are_uniform(plan)) continue;
    SCOPED_TRACE(concat("seed ", seed, ", pair ", i, ", ", plan.segments.count, " segments: ", src.to_string(), " -> ",
                        dst.to_string()));
    const std::vector<Plan> segments = plans_of_segments(plan);
    ASSERT_EQ(static_cast<int64_t>(segments.size()), plan.segments.count);
    std::vector<int> times(shape[0], 0);
    for (const bool of_src : {true, false}) {
      const Layout& whole = of_src ? src : dst;
      for (int64_t p = 0; p < whole.mesh().size(); ++p) {
        const IntervalList part = whole.part(0, p);
        const PartsInSegments parts(whole, 0);
        int64_t in_all = 0;
        for (const Plan& one : segments) {
          const IntervalList indices = (of_src ? one.src : one.dst).part(0, p);
          in_all += length(indices);
          ASSERT_LE(length(indices), parts.largest_count_in_segment(plan.segments.count));
          for (const Interval& run : part) {
            const int64_t share = (run.end - run.begin) / plan.segments.count;
            const int64_t has = intersection_length(indices, {run});
            ASSERT_GE(has, share);
            ASSERT_LE(has, share + 1);
          }
          for (const Interval& run : of_src ? indices : IntervalList()) {
            for (int64_t index = run.begin; index < run.end; ++index) ++times[index];
          }
        }
        ASSERT_EQ(in_all, length(part));
      }
    }
    const auto replicas = static_cast<int>(src.mesh().group_size(src.replicated_dims()));
    ASSERT_EQ(times, std::vector<int>(shape[0], replicas));
  }
}

// Rules that make equal parts have blocks too, whatever sizes they name.
TEST(InSegments, SupportRulesThatMakeEqualParts) {
  for (const char* placements :
       {"Cyclic(0,2)", "Cyclic(0,4)", "Blocks(0,4)", "Ragged(0,4:4:4:4)", "Ragged(0,2:8:0:6)", "Packed(0,8:8)"}) {
    for (const char* others : {"S(0),R", "Owned(0,0),S(0)", "S(1),Packed(0,8:8)"}) {
      const Layout cut = test::layout_of(test::mesh_of({4}), {16, 3}, placements);
      const std::vector<int64_t> sizes = others[0] == 'O' ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{2, 2};
      const Layout other = test::layout_of(test::mesh_of(sizes, ranks_from(4, sizes[0] * 2)), {16, 3}, others);
      SCOPED_TRACE(concat(cut.to_string(), ", ", other.to_string()));
      for (Plan plan : {plan_through({cut, other}, {}), plan_through({other, cut}, {})}) {
        plan.segments = {0, 2};
        ASSERT_TRUE(can_run_in_segments(plan, plan.segments));
        simulate(plan);
        EXPECT_EQ(to_bytes(from_bytes(to_bytes(plan))), to_bytes(plan));
      }
    }
  }
}

// Layouts that flatten dims have fewer dims than the tensor.
TEST(InSegments, AreNotUsedForFlattenedDims) {
  const Layout src = test::layout_of(test::mesh_of({2}), {6, 4}, "P");
  const Layout dst(test::mesh_of({2}, {2, 3}), {6, 4}, src.dtype(), {Placement::parse("Ragged(0,4:20)")}, {},
                   StridedMeaning::kAuto, 2);
  const Plan plan = make_plan(src, dst, {});
  ASSERT_GE(plan.steps.size(), 2u);
  EXPECT_EQ(plan.segments, Segments());
  simulate(plan);
}

// Compares with the transfers in the ranks' programs. In all-to-alls, empty messages count too.
void expect_traffic_of_programs(const Plan& plan) {
  int64_t sent_max = 0;
  int64_t messages_max = 0;
  int64_t sent_messages_max = 0;
  bool has_all_to_alls = false;
  for (const Rank rank : ranks_of(plan)) {
    const Program program = compile(plan, rank);
    TransferTraffic all;
    for (const Instruction& instruction : program.instructions) {
      const TransferTraffic one = traffic_of(program, instruction.operation);
      all.sent_bytes += one.sent_bytes;
      all.received_messages += one.received_messages;
      all.sent_messages += one.sent_messages;
      has_all_to_alls = has_all_to_alls || std::holds_alternative<AllToAll>(instruction.operation);
    }
    ASSERT_EQ(traffic_at(plan, rank).sent_bytes, all.sent_bytes) << rank;
    sent_max = std::max(sent_max, all.sent_bytes);
    messages_max = std::max(messages_max, all.received_messages);
    sent_messages_max = std::max(sent_messages_max, all.sent_messages);
  }
  ASSERT_EQ(totals(plan).sent_bytes_max, sent_max);
  if (!has_all_to_alls) {
    ASSERT_EQ(totals(plan).messages_max, messages_max);
    ASSERT_EQ(totals(plan).sent_messages_max, sent_messages_max);
  }
}

// With any valid number of segments, ranks receive the same bytes as without segments, and need the predicted memory.
TEST(InSegments, MoveEveryElementOfRandomPairs) {
  const unsigned seed = 31;
  test::RandomPlacements random(seed);
  int64_t moved = 0;
  int64_t with_several_steps = 0;
  int64_t num_non_uniform = 0;
  for (int i = 0; i < 70; ++i) {
    std::vector<int64_t> shape{16 * random.pick(1, 3), 8 * random.pick(1, 4)};
    if (random.pick(0, 1) == 0) shape = {random.pick(1, 40), random.pick(1, 20)};
    if (random.pick(0, 2) == 0) shape.push_back(random.pick(1, 4));
    const Layout src = random.on_any_mesh(shape, 12).layout;
    const Layout dst = random.on_any_mesh(shape, 12).layout;
    if (src.mesh() == dst.mesh()) continue;
    const Lowering& lowering = random.pick(0, 1) == 0 ? Lowering::kGloo : Lowering::kNccl;
    Topology topology = with_nodes(random.pick(1, 4));
    if (random.pick(0, 1) == 0) topology.step_ps = topology.inside.message_ps = topology.between.message_ps = 1;
    Plan plan = make_plan(src, dst, {.lowering = lowering, .topology = topology});
    plan.segments = {};
    const TrafficTotals whole = totals(plan);
    for (int t = 0; t < src.ndim(); ++t) {
      for (const int64_t count : {2, 4, 7, 8}) {
        plan.segments = {t, count};
        if (!can_run_in_segments(plan, plan.segments)) continue;
        SCOPED_TRACE(concat("seed ", seed, ", pair ", i, ", ", count, " segments of dim ", t, ": ", src.to_string(),
                            " -> ", dst.to_string()));
        const SimulationReport report = simulate(plan);
        const TrafficTotals traffic = totals(plan);
        ASSERT_EQ(traffic.received_bytes_sum, whole.received_bytes_sum);
        ASSERT_EQ(traffic.received_bytes_sum, report.received_bytes_sum);
        ASSERT_EQ(traffic.received_bytes_max, whole.received_bytes_max);
        int64_t peak = 0;
        ProgramMemory memory(plan);
        for (const auto& [rank, bytes] : report.peak_bytes) {
          peak = std::max(peak, bytes);
          const std::vector<int64_t> peaks = compile(plan, rank).peak_bytes_by_step();
          ASSERT_EQ(bytes, *std::max_element(peaks.begin(), peaks.end()));
          ASSERT_EQ(memory.peak_bytes_by_step(rank), peaks) << "rank " << to_int(rank);
        }
        ASSERT_EQ(max_peak_bytes(plan).bytes, peak);
        ASSERT_EQ(to_bytes(from_bytes(to_bytes(plan))), to_bytes(plan));
        expect_traffic_of_programs(plan);
        ++moved;
        num_non_uniform += !are_uniform(plan);
        with_several_steps += traffic.steps > count;
      }
    }
  }
  EXPECT_GT(moved, 150);
  EXPECT_GT(num_non_uniform, 60);
  EXPECT_GT(with_several_steps, 40);
}

// Non-uniform segments take the time of their pipeline stages, each as long as its busiest rank needs, if the work of
// every rank in every segment is added up.
TEST(InSegments, TakeAboutThePredictedTime) {
  const unsigned seed = 53;
  test::RandomPlacements random(seed);
  Topology topology{"bytes alone", 0, 0, 0, {0, 1 << 20}, {0, 1 << 20}, {}};
  int64_t compared = 0;
  double sum = 0;
  for (int i = 0; i < 400; ++i) {
    const std::vector<int64_t> shape{random.pick(30, 200), random.pick(5, 60)};
    const Layout src = random.on_any_mesh(shape, 12).layout;
    const Layout dst = random.on_any_mesh(shape, 12).layout;
    if (src.mesh() == dst.mesh()) continue;
    Plan plan = make_plan(src, dst, {.topology = topology});
    plan.segments = {0, random.pick(2, 12)};
    if (plan.steps.size() < 2 || !can_run_in_segments(plan, plan.segments) || are_uniform(plan)) continue;
    const std::vector<Plan> segments = plans_of_segments(plan);
    const auto num_steps = static_cast<int64_t>(plan.steps.size());
    int64_t exact = 0;
    for (int64_t stage = 0; stage < plan.segments.count + num_steps - 1; ++stage) {
      std::map<Rank, Traffic> of_ranks;
      for (int64_t s = std::max<int64_t>(stage - plan.segments.count + 1, 0); s <= std::min(stage, num_steps - 1);
           ++s) {
        const StepTraffic traffic(segments[stage - s].steps[s], plan.lowering);
        for (const Rank rank : ranks_of(plan)) of_ranks[rank] = of_ranks[rank] + traffic.at(rank);
      }
      int64_t busiest = 0;
      for (const auto& [rank, one] : of_ranks) busiest = std::max({busiest, one.received_bytes, one.sent_bytes});
      exact += picoseconds_for(busiest, topology.inside.ps_per_kib);
    }
    if (exact == 0) continue;
    SCOPED_TRACE(concat("seed ", seed, ", pair ", i, ", ", plan.segments.count, " segments: ", to_string(plan)));
    const double ratio = static_cast<double>(predicted_picoseconds(plan)) / static_cast<double>(exact);
    EXPECT_GT(ratio, 0.9);
    EXPECT_LT(ratio, 1.5);
    sum += ratio;
    ++compared;
  }
  ASSERT_GT(compared, 40);
  std::printf("%lld plans, predicted to take %.3f times as long on average\n", static_cast<long long>(compared),
              sum / static_cast<double>(compared));
  EXPECT_LT(sum / static_cast<double>(compared), 1.1);
}

// Sums on the source's mesh and zeros on the destination's are ordinary steps.
TEST(InSegments, ReduceBeforeAndFillAfterTheCrossing) {
  const Layout src = test::layout_of(test::mesh_of({2, 2}), {16, 8}, "P,S(0)");
  const Layout dst = test::layout_of(test::mesh_of({4}, ranks_from(4, 4)), {16, 8}, "P");
  for (const Lowering& lowering : {Lowering::kGloo, Lowering::kNccl}) {
    Plan plan = make_plan(src, dst, {.lowering = lowering});
    ASSERT_GE(plan.steps.size(), 3u);
    plan.segments = {1, 4};
    ASSERT_TRUE(can_run_in_segments(plan, plan.segments));
    simulate(plan);
  }
}

// While stripes cross, earlier ones are gathered. The busiest rank's bytes count once. The time that only the first and
// the last segment take counts by a segment's share.
TEST(InSegments, TakeLittleLongerThanTheBusiestRank) {
  const Layout src = test::layout_of(test::mesh_of({16}), {128, 1536, 4096}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({8, 8}, ranks_from(16, 64)), {128, 1536, 4096}, "R,S(1)");
  Topology topology = with_nodes(8);
  topology.step_ps = topology.inside.message_ps = topology.between.message_ps = topology.memory_ps_per_kib = 0;
  const Plan plan = make_plan(src, dst, {.topology = topology});
  ASSERT_GT(plan.segments.count, 8);
  const ExchangeBound bound = exchange_bound(src, dst, 8);
  const int64_t busiest = std::max(bound.received_bytes_max, bound.forwarded_sent_bytes_max);
  const auto depth = static_cast<double>(plan.steps.size());
  EXPECT_LE(totals(plan).sent_bytes_max, busiest);
  EXPECT_EQ(totals(plan).received_bytes_max, busiest);
  EXPECT_LE(static_cast<double>(predicted_picoseconds(plan)),
            (1 + depth / static_cast<double>(plan.segments.count)) *
                static_cast<double>(picoseconds_for(busiest, topology.between.ps_per_kib)));
  // Segments are chosen if they are faster.
  Plan whole = plan;
  whole.segments = {};
  EXPECT_LT(predicted_picoseconds(plan), predicted_picoseconds(whole));
}

// Returns a layout on few ranks, or on up to 96 of 120.
Layout on_a_mesh(test::RandomPlacements& random, const std::vector<int64_t>& shape, bool is_large) {
  if (!is_large) return random.on_any_mesh(shape, 16).layout;
  const std::vector<std::vector<int64_t>> all{{8, 12}, {5, 3, 4}, {90}, {2, 33}};
  const std::vector<int64_t>& sizes = all[random.pick(0, std::ssize(all) - 1)];
  const int64_t size = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  const std::vector<int64_t> ranks = ranks_from(random.pick(0, 120 - size), size);
  return random.on(test::mesh_of(sizes, ranks), ranks, shape).layout;
}

// Makes some uncut mesh dims pending sums.
Layout with_some_sums(test::RandomPlacements& random, const Layout& layout) {
  std::vector<Placement> placements = layout.placements();
  for (Placement& placement : placements) {
    if (placement == Placement::replicate() && random.pick(0, 2) == 0) placement = parse_placements("P").front();
  }
  return layout.with(layout.cuts(), placements);
}

// Compares the memory of every rank, computed without its program, and that of the worst rank, for any number of ranks.
TEST(InSegments, PredictedMemoryMatchesPrograms) {
  const unsigned seed = 71;
  test::RandomPlacements random(seed);
  int64_t num_non_uniform = 0;
  int64_t num_uniform = 0;
  int64_t on_many = 0;
  for (int i = 0; i < 80; ++i) {
    std::vector<int64_t> shape{random.pick(8, 60), random.pick(1, 24)};
    if (random.pick(0, 1) == 0) shape = {64 * random.pick(1, 2), 24};
    const Layout src = with_some_sums(random, on_a_mesh(random, shape, i % 6 == 0));
    const Layout dst = on_a_mesh(random, shape, i % 6 == 0);
    if (src.mesh() == dst.mesh()) continue;
    const Lowering& lowering = random.pick(0, 1) == 0 ? Lowering::kGloo : Lowering::kNccl;
    Plan plan = make_plan(src, dst, {.lowering = lowering, .topology = with_nodes(random.pick(1, 4))});
    for (int t = 0; t < src.ndim(); ++t) {
      for (const int64_t count : {2, 5, 8}) {
        plan.segments = {t, count};
        if (!can_run_in_segments(plan, plan.segments)) continue;
        SCOPED_TRACE(concat("seed ", seed, ", pair ", i, ", ", count, " segments of dim ", t, ": ", to_string(plan)));
        for (const Plan& segment : plans_of_segments(plan)) {
          ProgramMemory of_segment(segment);
          for (const Rank rank : ranks_of(plan)) {
            ASSERT_EQ(of_segment.peak_bytes_by_step(rank), compile(segment, rank).peak_bytes_by_step())
                << "rank " << to_int(rank);
          }
        }
        ProgramMemory memory(plan);
        std::vector<int64_t> maxima(plan.steps.size(), 0);
        for (const Rank rank : ranks_of(plan)) {
          const std::vector<int64_t> peaks = compile(plan, rank).peak_bytes_by_step();
          ASSERT_EQ(memory.peak_bytes_by_step(rank), peaks) << "rank " << to_int(rank);
          for (size_t s = 0; s < peaks.size(); ++s) maxima[s] = std::max(maxima[s], peaks[s]);
        }
        const ProgramMemory::MaxPeaks found = memory.max_peak_bytes_by_step(kMaxRanksExamined);
        ASSERT_TRUE(found.is_exact);
        ASSERT_EQ(found.bytes, maxima);
        (are_uniform(plan) ? num_uniform : num_non_uniform) += 1;
        on_many += ranks_of(plan).size() > 64;
      }
    }
  }
  EXPECT_GT(num_non_uniform, 60);
  EXPECT_GT(num_uniform, 60);
  EXPECT_GT(on_many, 20);
}

// Ranks that differ only in mesh dims that cut the held part serve each other.
void expect_traffic_of_regions(const Step& step, Lowering lowering) {
  const MeshStepTraffic traffic(step, lowering);
  const int64_t item = step.before.dtype().size_bytes();
  for (int64_t p = 0; p < step.before.mesh().size(); ++p) {
    Traffic counted;
    for (const int64_t other : step.before.mesh().group(p, step.mesh_dims & step.before.cut_dims())) {
      if (other == p) continue;
      const int64_t received = shared_elements(step.before.region(other), step.after.region(p));
      const int64_t sent = shared_elements(step.before.region(p), step.after.region(other));
      counted = counted + Traffic{received * item, sent * item, received > 0, sent > 0};
    }
    const Traffic found = traffic.at(p);
    ASSERT_EQ(found.received_bytes, counted.received_bytes) << p;
    ASSERT_EQ(found.sent_bytes, counted.sent_bytes) << p;
    ASSERT_EQ(found.messages, counted.messages) << p;
    ASSERT_EQ(found.sent_messages, counted.sent_messages) << p;
  }
}

// Counts received and sent bytes in each step of non-uniform segments, whose layouts have only some indices, over the
// regions of all pairs of ranks.
TEST(InSegments, TrafficMatchesTheRegionsOfRanks) {
  const unsigned seed = 83;
  test::RandomPlacements random(seed);
  int64_t steps = 0;
  for (int i = 0; i < 240; ++i) {
    std::vector<int64_t> shape{random.pick(8, 60), random.pick(1, 24)};
    if (random.pick(0, 1) == 0) shape = {64, 24};  // often equal parts before some indices are left out
    const Layout src = on_a_mesh(random, shape, i % 6 == 0);
    const Layout dst = on_a_mesh(random, shape, i % 6 == 0);
    if (src.mesh() == dst.mesh()) continue;
    Plan plan = make_plan(src, dst, {.topology = with_nodes(random.pick(1, 4))});
    plan.segments = {static_cast<int>(random.pick(0, 1)), random.pick(2, 8)};
    if (!can_run_in_segments(plan, plan.segments) || are_uniform(plan)) continue;
    SCOPED_TRACE(concat("seed ", seed, ", pair ", i, ": ", to_string(plan)));
    for (const Plan& segment : plans_of_segments(plan)) {
      for (const Step& step : segment.steps) {
        if (step.before.mesh() != step.after.mesh() || is_local(step.op) || step.policy != ReplicaPolicy::kAligned)
          continue;
        expect_traffic_of_regions(step, segment.lowering);
        ++steps;
      }
    }
  }
  EXPECT_GT(steps, 60);
}

// Only segments under way have temporaries, so more segments take less memory.
TEST(InSegments, TemporariesShrinkWithMoreSegments) {
  const Layout src = test::layout_of(test::mesh_of({2}), {64, 64}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({4}, ranks_from(2, 4)), {64, 64}, "R");
  const Layout stripes = test::layout_of(test::mesh_of({4}, ranks_from(2, 4)), {64, 64}, "S(0)");
  Plan plan = plan_through({src, stripes, dst}, {});
  const int64_t result = dst.largest_part_bytes();
  int64_t previous = std::numeric_limits<int64_t>::max();
  for (const int64_t count : {4, 8, 16}) {
    plan.segments = {1, count};
    const int64_t temporaries = max_peak_bytes(plan).bytes - result;
    EXPECT_LT(temporaries, previous);
    EXPECT_LE(temporaries, 4 * result / count);
    previous = temporaries;
  }
}

// If segments exceed the memory limit, the plan has none.
TEST(InSegments, KeepToTheMemoryLimit) {
  const Layout src = test::layout_of(test::mesh_of({16}), {128, 1536, 64}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({8, 8}, ranks_from(16, 64)), {128, 1536, 64}, "R,S(1)");
  const PlanOptions options{.topology = with_nodes(8)};
  for (const int64_t limit : {dst.largest_part_bytes() * 9 / 8, dst.largest_part_bytes() * 3}) {
    const Plan plan = make_plan_within(src, dst, options, limit);
    EXPECT_LE(peak_bytes(plan), limit);
  }
}

TEST(InSegments, AreRejectedIfInvalid) {
  const Layout src = test::layout_of(test::mesh_of({4}), {16, 6}, "S(0)");
  const Layout dst = test::layout_of(test::mesh_of({2}, {4, 5}), {16, 6}, "S(0)");
  Plan plan = plan_through({src, dst}, {});
  for (const Segments& segments : {Segments{0, 17}, Segments{1, 7}, Segments{1, 257}, Segments{0, -1}}) {
    plan.segments = segments;
    EXPECT_THROW(from_bytes(to_bytes(plan)), UserError) << segments.tensor_dim << " " << segments.count;
  }
  Plan on_one = make_plan(src, test::layout_of(test::mesh_of({4}), {16, 6}, "S(1)"), {});
  on_one.segments = {0, 2};
  EXPECT_THROW(from_bytes(to_bytes(on_one)), UserError);
}

}  // namespace
}  // namespace shardwright
