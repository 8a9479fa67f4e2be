// Compares the forecast of a batch with the programs of all ranks and with lists of elements.
#include "batch/batch_forecast.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "batch/batch_certificate.h"
#include "batch/compile_batch.h"
#include "layouts.h"
#include "moves/step_counts.h"
#include "search/make_plan.h"
#include "two_meshes.h"

namespace shardwright {
namespace {

using test::in_common;
using test::layout_of;
using test::mesh_of;
using test::Placed;
using test::RandomPlacements;

constexpr int64_t kWorld = 7;

// Compares the elements that each rank needs and lacks, and those that it holds already, for each tensor.
void expect_destinations(const BatchForecast& made, const std::vector<std::pair<Placed, Placed>>& pairs) {
  for (size_t i = 0; i < pairs.size(); ++i) {
    const int64_t item_bytes = pairs[i].second.layout.dtype().size_bytes();
    int64_t received = 0;
    int64_t maximum = 0;
    int64_t kept = 0;
    for (int64_t r = 0; r < kWorld; ++r) {
      const auto needed = test::elements_of(pairs[i].second, Rank{r});
      const auto own = static_cast<int64_t>(in_common(needed, test::elements_of(pairs[i].first, Rank{r})).size());
      kept += own * item_bytes;
      received += (static_cast<int64_t>(needed.size()) - own) * item_bytes;
      maximum = std::max(maximum, (static_cast<int64_t>(needed.size()) - own) * item_bytes);
    }
    EXPECT_EQ(made.destinations[i].received_bytes, received);
    EXPECT_EQ(made.destinations[i].received_bytes_max, maximum);
    EXPECT_EQ(made.destinations[i].kept_bytes, kept);
    EXPECT_EQ(made.destinations[i].first_round >= 0, received > 0);
  }
}

BatchStrides row_major_in(const Batch& batch, Rank rank) {
  BatchStrides strides;
  for (const Layout& one : batch.sources) strides.sources.push_back(row_major_strides(one.local_shape_of_rank(rank)));
  for (const Layout& one : batch.destinations) {
    strides.destinations.push_back(row_major_strides(one.local_shape_of_rank(rank)));
  }
  return strides;
}

// Compares bytes and messages of each pair of ranks with the rounds of the receiver's program.
void expect_links(const BatchForecast& made, const BatchPlan& plan) {
  std::map<std::pair<Rank, Rank>, std::pair<int64_t, int64_t>> links;
  std::vector<std::pair<int, int>> rounds(plan.batch().destinations.size(), {-1, -1});
  for (int64_t r = 0; r < kWorld; ++r) {
    const Program program = compile_batch(plan, Rank{r}, kWorld, row_major_in(plan.batch(), Rank{r}));
    for (const Instruction& instruction : program.instructions) {
      if (const auto* move = std::get_if<SendReceive>(&instruction.operation)) {
        for (const auto& message : move->receives) {
          auto& [bytes, messages] = links[{Rank{message.peer}, Rank{r}}];
          bytes += message.range.count;
          ++messages;
        }
      }
      const auto* copy = std::get_if<Copy>(&instruction.operation);
      if (copy == nullptr || program.is_input(copy->src) || !program.is_of_caller(copy->dst)) continue;
      auto& [first, last] = rounds[copy->dst - static_cast<int>(program.num_inputs())];
      const int round = instruction.step - 1;
      first = first < 0 ? round : std::min(first, round);
      last = std::max(last, round);
    }
  }
  ASSERT_EQ(made.links.size(), links.size());
  for (const BatchForecast::OfLink& link : made.links) {
    const auto& [bytes, messages] = links.at({link.from, link.to});
    EXPECT_EQ(link.bytes, bytes);
    EXPECT_GE(link.messages, messages);
    EXPECT_LE(link.messages, plan.num_rounds());
  }
  for (size_t d = 0; d < rounds.size(); ++d) {
    if (rounds[d].first < 0) continue;
    // The first or last piece of a small message may be empty.
    EXPECT_LE(made.destinations[d].first_round, rounds[d].first);
    EXPECT_GE(made.destinations[d].last_round, rounds[d].second);
  }
}

TEST(BatchForecast, CountsBytesAndMessagesOfPrograms) {
  RandomPlacements random(5);
  for (int trial = 0; trial < 60; ++trial) {
    std::vector<std::pair<Placed, Placed>> pairs;
    std::vector<std::pair<Layout, Layout>> layouts;
    for (int64_t i = 0, count = random.pick(1, 4); i < count; ++i) {
      const auto shape = random.shape(9);
      pairs.emplace_back(random.on_any_mesh(shape, kWorld), random.on_any_mesh(shape, kWorld));
      layouts.emplace_back(pairs.back().first.layout, pairs.back().second.layout);
    }
    const BatchPlan plan(whole_tensors(layouts, random.pick(0, 1) ? 400 : 1 << 20, 2));
    const BatchForecast made = forecast(plan, Topology::named("64x8"));
    expect_destinations(made, pairs);
    expect_links(made, plan);
    int64_t received = 0;
    for (const BatchForecast::OfLink& link : made.links) received += link.bytes;
    EXPECT_EQ(received, certificate_of(plan).received_bytes_sum);
  }
}

TEST(BatchForecast, PredictedTimeIsThatOfTheBusiestRank) {
  Topology topology;
  topology.name = "by hand";
  topology.ranks_per_node = 2;
  topology.step_ps = 1000;
  topology.inside = {10, 1024};   // 1 ps per byte
  topology.between = {50, 4096};  // 4 ps per byte
  // Rank 0 sends 400 bytes each to rank 1 on its node and to rank 2 on another.
  const Layout src = layout_of(mesh_of({1}), {100}, "R");
  const Layout dst = layout_of(mesh_of({2}, {1, 2}), {100}, "R");
  const BatchPlan plan(whole_tensors({{src, dst}}, 1 << 20, 2));
  const BatchForecast made = forecast(plan, topology);
  ASSERT_EQ(made.links.size(), 2u);
  EXPECT_EQ(made.links[0].predicted_ps, 10 + 400);
  EXPECT_EQ(made.links[1].predicted_ps, 50 + 1600);
  EXPECT_EQ(made.destinations[0].predicted_ps, 400 + 1600);
  // The sender takes a round and the bytes of both messages. The receiver on the other node takes a round, a message
  // and 1,600 ps of bytes.
  EXPECT_EQ(made.predicted_ps, 1000 + 2000);
}

TEST(BatchForecast, NothingMovesBetweenEqualLayouts) {
  const Layout layout = layout_of(mesh_of({2}), {4}, "S(0)");
  const BatchForecast made = forecast(BatchPlan(whole_tensors({{layout, layout}})), Topology::named("64x8"));
  EXPECT_TRUE(made.links.empty());
  EXPECT_EQ(made.predicted_ps, 0);
  EXPECT_EQ(made.destinations[0].kept_bytes, 16);
  EXPECT_EQ(made.destinations[0].last_round, -1);
}

// The plans that reduce two sources take all the time; nothing is left to move.
TEST(BatchForecast, PredictedTimeIncludesReductions) {
  const MeshPtr mesh = mesh_of({4});
  const Layout src = layout_of(mesh, {1024, 1024}, "P");
  const Layout dst = layout_of(mesh, {1024, 1024}, "S(0)");
  const Topology topology = Topology::named("64x8");
  const BatchForecast made = forecast(BatchPlan(whole_tensors({{src, dst}, {src, dst}})), topology);
  const auto of_one = [&](const Lowering& lowering) {
    return predicted_picoseconds(make_plan(src, dst, {.lowering = lowering, .topology = topology}));
  };
  EXPECT_EQ(made.reducing_ps, 2 * std::max(of_one(Lowering::kNccl), of_one(Lowering::kGloo)));
  EXPECT_EQ(made.predicted_ps, made.reducing_ps);
  EXPECT_TRUE(made.links.empty());
}

}  // namespace
}  // namespace shardwright
