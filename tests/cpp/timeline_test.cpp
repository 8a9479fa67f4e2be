// Predicted times of products and lanes, worked out by hand.
#include "products/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "products/compile.h"
#include "program/builder.h"
#include "search/make_plan.h"
#include "support/error.h"

namespace shardwright {
namespace {

// 10 processors of 1 flop per ps for 16 bits, and tiles of 64 x 64; nothing else takes time.
const GemmModel kPlain{"plain", 10, 64, 64, 1'000'000, 0, 0, 0};

TEST(GemmModel, CountsWavesOfTiles) {
  const int64_t tile = 2 * 64 * 64 * 1000;
  EXPECT_EQ(kPlain.picoseconds(640, 64, 1000, 1, 2), tile);
  EXPECT_EQ(kPlain.picoseconds(640, 640, 1000, 1, 2), 10 * tile);
  EXPECT_EQ(kPlain.picoseconds(640, 64, 1000, 3, 2), 3 * tile);
  EXPECT_EQ(kPlain.picoseconds(640, 64, 1000, 1, 4), 2 * tile);
  EXPECT_EQ(kPlain.picoseconds(640, 64, 1000, 1, 1), tile / 2);
  EXPECT_EQ(kPlain.picoseconds(0, 64, 1000, 1, 2), 0);
}

TEST(GemmModel, UsesSmallerTilesForSmallProducts) {
  // One tile of 64 x 64 would keep one processor busy; eight of 32 x 16 take an eighth, at 145% of the time.
  EXPECT_EQ(kPlain.picoseconds(64, 64, 1000, 1, 2), 2 * 16 * 32 * 1000 * 145 / 100);
}

TEST(GemmModel, TimeIncludesMemoryTrafficAndLaunches) {
  GemmModel model = kPlain;
  model.launch_ps = 7;
  EXPECT_EQ(model.picoseconds(640, 64, 1000, 1, 2), 2 * 64 * 64 * 1000 + 7);
  model.memory_ps_per_kib = 1'000'000'000;
  EXPECT_EQ(model.picoseconds(1024, 1, 1, 1, 2), 2 * (1024 + 1 + 1024) * int64_t{1'000'000'000} / 1024 + 7);
  EXPECT_GT(model.picoseconds(int64_t{1} << 40, int64_t{1} << 40, int64_t{1} << 40, 1, 2), int64_t{1} << 59);
}

TEST(GemmModel, FindsModelsByNameAndRejectsInvalidOnes) {
  for (const std::string& name : GemmModel::names()) GemmModel::named(name).check();
  EXPECT_THROW(GemmModel::named("abacus"), UserError);
  GemmModel wrong = kPlain;
  wrong.flops_per_us = 0;
  EXPECT_THROW(wrong.check(), UserError);
  wrong = kPlain;
  wrong.launch_ps = Topology::kMaxValue + 1;
  EXPECT_THROW(wrong.check(), UserError);
}

TEST(GemmModel, CountsWavesOfWholeTilesAndLeavesProcessors) {
  EXPECT_EQ(kPlain.waves(640, 64, 1), 1);
  EXPECT_EQ(kPlain.waves(640, 65, 1), 2);
  EXPECT_EQ(kPlain.waves(640, 64, 3), 3);
  EXPECT_EQ(kPlain.waves(1, 1, 1), 1);
  EXPECT_EQ(kPlain.waves(0, 1, 1), 1);
  EXPECT_EQ(kPlain.with_fewer_processors(2).waves(640, 64, 1), 2);
  EXPECT_EQ(kPlain.with_fewer_processors(5).picoseconds(640, 64, 1000, 1, 2),
            2 * kPlain.picoseconds(640, 64, 1000, 1, 2));
  EXPECT_EQ(kPlain.with_fewer_processors(100).num_processors, 1);
}

// A host: one processor with the same rate, which runs one instruction after the other.
const GemmModel kHost{"host", 1, 640, 64, 10'000'000, 0, 0, 0};

// A byte takes 1 ps, and a transfer 100 ps; nothing else takes time.
Topology bytes_only(int64_t ps_per_byte = 1) {
  return {"test", 0, 100, 0, {0, 1024 * ps_per_byte}, {0, 1024 * ps_per_byte}, {}};
}

Matmul gather_of(int64_t ranks, int64_t rows, int64_t k, int64_t columns, int64_t ps_per_byte = 1) {
  const auto mesh = std::make_shared<Mesh>(std::vector<std::string>{"a"}, std::vector<int64_t>{ranks});
  const auto layout = [&](std::vector<int64_t> shape, const char* placement) {
    return Layout(mesh, std::move(shape), DType::parse("bfloat16"), {Placement::parse(placement)});
  };
  PlanOptions options;
  options.topology = bytes_only(ps_per_byte);
  return GatherMatmul{make_plan(layout({rows, k}, "S(0)"), layout({rows, k}, "R"), options),
                      {{Contraction::parse("mk,nk->mn"), layout({columns, k}, "R"), false}},
                      false};
}

constexpr int64_t kTile = 2 * 64 * 64 * 64;  // one wave: 640 rows by 64 columns over 64
constexpr int64_t kPart = 640 * 64 * 2;      // bytes

GemmModel slowed_by_half(GemmModel model) {
  model.contention_percent = 50;
  return model;
}

TEST(Timeline, AddsUpSerialTimesAndHidesOverlappedTransfers) {
  const Matmul matmul = gather_of(4, 2560, 64, 64);
  for (const GemmModel& model : {kPlain, kHost, slowed_by_half(kPlain), slowed_by_half(kHost)}) {
    const Timeline serial = predict(matmul, {Method::kSerial, 1}, model);
    EXPECT_EQ(serial.total_ps, 100 + 3 * kPart + 4 * kTile);
    EXPECT_EQ(serial.gemm_ps, 4 * kTile);
    EXPECT_EQ(serial.communication_ps, 100 + 3 * kPart);
  }
  // On a host, each part is sent while the one before it is multiplied, which takes longer.
  const int64_t transfer = 100 + kPart;
  ASSERT_GT(kTile, transfer);
  EXPECT_EQ(predict(matmul, {Method::kRing, 4}, kHost).total_ps, 4 * kTile);
  EXPECT_EQ(predict(matmul, {Method::kRing, 4}, slowed_by_half(kHost)).total_ps, 4 * kTile + 3 * (transfer / 2));
}

// The first rank of two nodes of two receives a part from its neighbor and two from the other node, and sends as many
// in another order.
TEST(Timeline, MessagesWithinANodeUseTheInnerLink) {
  const Matmul matmul = gather_of(4, 2560, 64, 64);
  const Schedule ring{Method::kRing, 4};
  const Plan& plan = plan_of(matmul);
  const Program program = compile(matmul, ring, Rank{0});
  Topology topology{"test", 2, 100, 0, {4, 0}, {70, 1024}, {}};
  EXPECT_EQ(predict(program, topology, plan.src.mesh(), kHost).communication_ps, 3 * 100 + 4 + 2 * (70 + kPart));
  topology.inside.ps_per_kib = 512;
  EXPECT_EQ(predict(program, topology, plan.src.mesh(), kHost).communication_ps,
            3 * 100 + 4 + kPart / 2 + 2 * (70 + kPart));
  // A mesh dim with its own link uses it for all its ranks, wherever they are.
  topology.mesh_dims["a"] = {70, 1024};
  EXPECT_EQ(predict(program, topology, plan.src.mesh(), kHost).communication_ps, 3 * (100 + 70 + kPart));
  // On one node all messages use the inner link.
  topology = {"test", 4, 100, 0, {3, 512}, {70, 1024}, {}};
  EXPECT_EQ(predict(program, topology, plan.src.mesh(), kHost).communication_ps, 3 * (100 + 3 + kPart / 2));
}

// Two ranks, two chunks of half a part: both can be received while the own part is multiplied.
TEST(Timeline, HostsGainFromTransfersStartedAhead) {
  const Matmul matmul = gather_of(2, 1280, 64, 64);
  GemmModel fast = kHost;
  fast.flops_per_us *= 8;
  const int64_t own = fast.picoseconds(640, 64, 64, 1, 2);
  const int64_t half = fast.picoseconds(320, 64, 64, 1, 2);
  const int64_t transfer = 100 + kPart / 2;
  ASSERT_GT(own, transfer);
  ASSERT_LT(half, transfer);
  ASSERT_LT(2 * transfer, own + half);
  EXPECT_EQ(predict(matmul, {Method::kCollective, 2, {}, 1}, fast).total_ps, own + transfer + half);
  EXPECT_EQ(predict(matmul, {Method::kCollective, 2, {}, 2}, fast).total_ps, own + 2 * half);
}

TEST(Timeline, AddsADelayPerChunkOnHosts) {
  const auto waiting = [](GemmModel model, int64_t chunk_ps) {
    model.chunk_ps = chunk_ps;
    return model;
  };
  // Transfers take longer than products, so the delay of each chunk counts.
  const Matmul slow = gather_of(2, 1280, 64, 64, 100);
  const int64_t all = 2 * kTile;  // time of all products
  for (const int64_t chunks : {1, 2, 4}) {
    const Schedule schedule{Method::kCollective, chunks};
    const Timeline before = predict(slow, schedule, kHost);
    const Timeline after = predict(slow, schedule, waiting(kHost, 1000));
    EXPECT_EQ(after.total_ps - before.total_ps, chunks * 1000) << chunks;
    EXPECT_EQ(predict(slow, schedule, waiting(kPlain, 1000)).total_ps, predict(slow, schedule, kPlain).total_ps);
  }
  EXPECT_EQ(predict(slow, {}, waiting(kHost, 1000)).total_ps, predict(slow, {}, kHost).total_ps);
  // With this delay, fewer chunks are chosen.
  ASSERT_GT(choose_fastest(slow, kHost).chunks, 2);
  EXPECT_LE(choose_fastest(slow, waiting(kHost, all / 4)).chunks, 2);
}

TEST(Timeline, TriesManyChunksIfDoublingPays) {
  const auto counts = [](const Matmul& matmul, int64_t chunk_ps) {
    GemmModel model = kHost;
    model.chunk_ps = chunk_ps;
    std::set<int64_t> found;
    for (const Prediction& one : predictions(matmul, model)) found.insert(one.schedule.chunks);
    return found;
  };
  const Matmul matmul = gather_of(2, 20480, 64, 64, 100);
  EXPECT_EQ(counts(matmul, 0), (std::set<int64_t>{1, 2, 4, 8, 16, 32}));
  EXPECT_EQ(counts(matmul, 1 << 30), (std::set<int64_t>{1, 2, 4, 8}));
  EXPECT_GT(choose_fastest(matmul, kHost).chunks, 8);
}

TEST(Timeline, DeviceTransfersWaitForProductsThatLeaveNoProcessors) {
  const Matmul matmul = gather_of(4, 2560, 64, 64);
  const int64_t transfer = 100 + kPart;
  // The first transfer is done before the own product. The second has its own slot, becomes ready while the own product
  // runs, and begins after it, together with the next product. The third needs the slot of the first, which the product
  // over it only releases when the next product begins, so it comes after both and overlaps with nothing.
  EXPECT_EQ(predict(matmul, {Method::kRing, 4, {}, 1}, kPlain).total_ps, 4 * kTile + transfer);
  EXPECT_EQ(predict(matmul, {Method::kRing, 4, {}, 1}, slowed_by_half(kPlain)).total_ps,
            4 * kTile + transfer + 2 * (transfer / 2));
  // If all chunks have slots, each transfer begins after the product before it.
  EXPECT_EQ(predict(matmul, {Method::kRing, 4, {}, 3}, kPlain).total_ps, 4 * kTile);
  EXPECT_EQ(predict(matmul, {Method::kRing, 4, {}, 3}, slowed_by_half(kPlain)).total_ps,
            4 * kTile + 3 * (transfer / 2));
}

// 1,280 rows are summed over two ranks, and each rank keeps 640.
Matmul scatter_of_two() {
  const auto mesh = std::make_shared<Mesh>(std::vector<std::string>{"a"}, std::vector<int64_t>{2});
  const auto layout = [&](std::vector<int64_t> shape, const char* placement) {
    return Layout(mesh, std::move(shape), DType::parse("bfloat16"), {Placement::parse(placement)});
  };
  PlanOptions options;
  options.topology = bytes_only();
  return MatmulScatter{make_plan(layout({1280, 64}, "P"), layout({1280, 64}, "S(0)"), options),
                       {{Contraction::parse("mk,nk->mn"), layout({1280, 128}, "S(1)"), layout({64, 128}, "S(1)")}}};
}

TEST(Timeline, DeviceTransfersOverlapProductsThatLeaveProcessors) {
  const Matmul matmul = scatter_of_two();
  // The block to send is ready when the own product begins, which takes all processors first.
  EXPECT_EQ(predict(matmul, {Method::kRing, 2}, kPlain).total_ps, 2 * kTile + 100 + kPart);
  EXPECT_EQ(predict(matmul, {Method::kRing, 2}, kHost).total_ps, 2 * kTile);
  // The own product has 8 of the 10 processors; the first product has all, because nothing runs during it. 10 tiles are
  // one wave of 8, and 2 in quarters, which take 30% longer. The transfer begins after the first of two waves and has 2
  // of the 16 processors it needs.
  const int64_t own = kTile + kTile * 130 / 100 / 4;
  const auto two_left = predict(matmul, {Method::kRing, 2, {}, 1, 2}, slowed_by_half(kPlain));
  EXPECT_EQ(two_left.total_ps, kTile + own / 2 + 100 + kPart * 8);
  EXPECT_EQ(two_left.gemm_ps, 2 * kTile);
  EXPECT_EQ(two_left.communication_ps, 100 + kPart);
  // On hosts, products leave no processors to transfers.
  EXPECT_EQ(predict(matmul, {Method::kRing, 2, {}, 1, 2}, kHost).total_ps, 2 * kTile);
}

TEST(Timeline, CopyEnginesNeedNoProcessorsAndHideStartsOfQueuedTransfers) {
  const GemmModel engines = slowed_by_half(kPlain).with_copy_engines();
  // The block to send is copied while the own product runs.
  EXPECT_EQ(predict(scatter_of_two(), {Method::kRing, 2}, engines).total_ps, 2 * kTile + (100 + kPart) * 3 / 100);
  GemmModel fast = engines;
  fast.flops_per_us *= 1000;
  const int64_t own = fast.picoseconds(10, 1, 640, 1, 2);
  EXPECT_EQ(predict(gather_of(4, 40, 640, 1), {Method::kRing, 4}, fast).total_ps, 100 + 3 * 10 * 640 * 2 + own);
  for (const auto& [schedule, total] : predictions(scatter_of_two(), engines)) EXPECT_EQ(schedule.sms_left, 0);
}

TEST(Timeline, WaitsForLateData) {
  const Matmul matmul = gather_of(4, 40, 640, 1);
  const int64_t part_bytes = 10 * 640 * 2;
  GemmModel fast = kPlain;
  fast.flops_per_us *= 1000;
  const Timeline ring = predict(matmul, {Method::kRing, 4}, fast);
  const int64_t own = fast.picoseconds(10, 1, 640, 1, 2);
  ASSERT_LT(own, part_bytes);
  EXPECT_EQ(ring.total_ps, 3 * (100 + part_bytes) + own);
  EXPECT_EQ(predict(matmul, {Method::kRing, 4, {}, 3}, fast).total_ps, 3 * (100 + part_bytes) + own);
}

// An instruction takes the time of its ranges, not of their buffers; if it reads and writes different numbers of bytes,
// of the larger number.
TEST(Timeline, CountsTheBytesOfRanges) {
  Topology topology = bytes_only();
  topology.memory_ps_per_kib = 1024;  // a byte takes 1 ps
  const auto mesh = Mesh({"a"}, {1});
  const auto time_of = [&](const Operation& operation) {
    ProgramBuilder builder(DType::parse("float32"), Lowering{}, false, Rank{0});
    builder.new_buffer(100);
    builder.new_buffer(100, DType::parse("bfloat16"));
    builder.emit(operation);
    return predict(builder.program(), topology, mesh, kPlain).total_ps;
  };
  const BufferId wide{0};
  const BufferId narrow{1};
  EXPECT_EQ(time_of(FillZero{{wide, 30, 10}}), 40);
  EXPECT_EQ(time_of(FillZero{{wide, 0, 100}}), 400);
  EXPECT_EQ(time_of(Divide{{narrow, 0, 10}, 3}), 20);
  EXPECT_EQ(time_of(Power{{wide, 0, 10}, {wide, 50, 10}, 2}), 40);
  EXPECT_EQ(time_of(Cast{{wide, 5, 7}, {narrow, 0, 7}}), 28);
  EXPECT_EQ(time_of(Cast{{narrow, 5, 7}, {wide, 0, 7}}), 28);
}

TEST(Choice, IsSerialIfChunksDoNotPayAndNeverPredictedSlower) {
  EXPECT_NE(choose_fastest(gather_of(4, 2560, 64, 64), kPlain).method, Method::kSerial);
  GemmModel costly = kPlain;
  costly.launch_ps = int64_t{1} << 40;
  EXPECT_EQ(choose_fastest(gather_of(4, 2560, 64, 64), costly), Schedule{});
  EXPECT_EQ(choose_fastest(gather_of(1, 2560, 64, 64), kPlain), Schedule{});
  for (const int64_t rows : {4, 100, 4096}) {
    const Matmul matmul = gather_of(8, rows, 512, 512);
    const std::vector<Prediction> all = predictions(matmul, GemmModel::named("h100"));
    EXPECT_LE(predict(matmul, choose_fastest(matmul, GemmModel::named("h100")), GemmModel::named("h100")).total_ps,
              all.front().total_ps);
    EXPECT_EQ(all.front().schedule, Schedule{});
  }
}

// Every method and number of chunks has the depth and the number of processors left to transfers that are predicted to
// be fastest among those compared.
TEST(Choice, TunesDepthAndProcessorsLeftToTransfers) {
  const GemmModel h100 = GemmModel::named("h100");
  const Matmul balanced = gather_of(8, 32768, 4096, 4096, 4);
  for (const Matmul& matmul : {balanced, gather_of(4, 100, 512, 512), scatter_of_two()}) {
    const int64_t serial_peak = compile(matmul, {}, Rank{0}).peak_bytes();
    for (const auto& [schedule, total] : predictions(matmul, h100)) {
      EXPECT_EQ(predict(matmul, schedule, h100).total_ps, total);
      if (schedule.method == Method::kSerial) continue;
      EXPECT_EQ(tuned_schedule(matmul, {schedule.method, schedule.chunks}, h100), schedule);
      int64_t best = total;
      for (const int64_t depth : {int64_t{1}, kUsualDepth, schedule.chunks}) {
        for (const int64_t left : {int64_t{0}, h100.transfer_processors / 2, h100.transfer_processors}) {
          const Schedule other{schedule.method, schedule.chunks, {}, depth, left};
          const int64_t peak = compile(matmul, other, Rank{0}).peak_bytes();
          if (depth > kUsualDepth && peak > serial_peak) continue;
          best = std::min(best, predict(matmul, other, h100).total_ps);
        }
      }
      EXPECT_LE(total, best + best / 100 * kLeastTuningPercent + 1) << chunks_text(schedule);
    }
    for (const auto& [schedule, total] : predictions(matmul, h100, 2)) {
      EXPECT_EQ(schedule.depth, schedule.method == Method::kSerial ? 1 : 2);
    }
    EXPECT_EQ(tuned_schedule(matmul, {Method::kRing, 4}, h100, 2).depth, 2);
  }
  // If transfers take almost as long as products, they must run at the same time.
  const Schedule chosen = choose_fastest(balanced, h100);
  EXPECT_NE(chosen.method, Method::kSerial);
  EXPECT_GT(chosen.depth, 1);
  EXPECT_GT(chosen.sms_left, 0);
}

// On hosts no processors are left to transfers. Rings of many ranks keep depth 1, as their messages would share a link.
TEST(Choice, LeavesNoProcessorsOnHostsAndKeepsLargeRingsAtDepthOne) {
  GemmModel fast = kHost;
  fast.flops_per_us *= 8;
  const auto deepest = [&](int64_t ranks, Method method) {
    int64_t depth = 0;
    for (const auto& [schedule, total] : predictions(gather_of(ranks, 640 * ranks, 64, 64), fast)) {
      EXPECT_EQ(schedule.sms_left, 0);
      if (schedule.method == method) depth = std::max(depth, schedule.depth);
    }
    return depth;
  };
  EXPECT_GT(deepest(2, Method::kRing), 1);
  EXPECT_GT(deepest(2, Method::kCollective), 1);
  EXPECT_EQ(deepest(4, Method::kRing), 1);
}

}  // namespace
}  // namespace shardwright
