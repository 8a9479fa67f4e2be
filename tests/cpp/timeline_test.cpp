// Predicted times of products and lanes, worked out by hand.
#include "overlap/timeline.h"

#include <gtest/gtest.h>

#include "layout/error.h"

namespace shardwright {
namespace {

// 10 processors of 1 flop per ps for 16 bits, tiles of 64 x 64, nothing else costs.
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

TEST(GemmModel, TakesSmallerTilesForSmallProducts) {
  // One tile of 64 x 64 would keep one processor busy; eight of 32 x 16 take an eighth, at 145% of the time.
  EXPECT_EQ(kPlain.picoseconds(64, 64, 1000, 1, 2), 2 * 16 * 32 * 1000 * 145 / 100);
}

TEST(GemmModel, HoldsMemoryAndLaunchesAgainstIt) {
  GemmModel model = kPlain;
  model.launch_ps = 7;
  EXPECT_EQ(model.picoseconds(640, 64, 1000, 1, 2), 2 * 64 * 64 * 1000 + 7);
  model.memory_ps_per_kib = 1'000'000'000;
  EXPECT_EQ(model.picoseconds(1024, 1, 1, 1, 2), 2 * (1024 + 1 + 1024) * int64_t{1'000'000'000} / 1024 + 7);
  EXPECT_GT(model.picoseconds(int64_t{1} << 40, int64_t{1} << 40, int64_t{1} << 40, 1, 2), int64_t{1} << 59);
}

TEST(GemmModel, NamesWhatItKnows) {
  for (const std::string& name : GemmModel::names()) GemmModel::named(name).check();
  EXPECT_THROW(GemmModel::named("abacus"), UserError);
  GemmModel wrong = kPlain;
  wrong.flops_per_us = 0;
  EXPECT_THROW(wrong.check(), UserError);
}

// One byte takes one ps, a transfer 100 ps; nothing else costs.
Topology bytes_only() { return {"test", 0, 100, 0, {0, 1024}, {0, 1024}, {}}; }

Matmul gather_of(int64_t ranks, int64_t rows, int64_t k, int64_t columns) {
  const auto mesh = std::make_shared<Mesh>(std::vector<std::string>{"a"}, std::vector<int64_t>{ranks});
  const auto layout = [&](std::vector<int64_t> shape, const char* placement) {
    return Layout(mesh, std::move(shape), DType::parse("bfloat16"), {Placement::parse(placement)});
  };
  PlanOptions options;
  options.topology = bytes_only();
  return GatherMatmul{make_plan(layout({rows, k}, "S(0)"), layout({rows, k}, "R"), options),
                      {{Contraction::parse("mk,nk->mn"), layout({columns, k}, "R"), false}},
                      false};
}

TEST(Timeline, AddsUpWhatIsSerialAndHidesWhatIsNot) {
  const Matmul matmul = gather_of(4, 2560, 64, 64);
  const int64_t part_bytes = 640 * 64 * 2;
  const int64_t tile = 2 * 64 * 64 * 64;  // of 640 rows: one wave
  const Timeline serial = predict(matmul, {Method::kSerial, 1}, kPlain);
  EXPECT_EQ(serial.total_ps, 100 + 3 * part_bytes + 4 * tile);
  EXPECT_EQ(serial.gemm_ps, 4 * tile);
  EXPECT_EQ(serial.communication_ps, 100 + 3 * part_bytes);
  // Each part travels while the one before it is multiplied, which takes longer.
  const Timeline ring = predict(matmul, {Method::kRing, 4}, kPlain);
  ASSERT_GT(tile, 100 + part_bytes);
  EXPECT_EQ(ring.total_ps, 4 * tile);
  GemmModel slowed = kPlain;
  slowed.contention_percent = 50;
  EXPECT_EQ(predict(matmul, {Method::kRing, 4}, slowed).total_ps, 4 * tile + 3 * ((100 + part_bytes) * 50 / 100));
  EXPECT_EQ(predict(matmul, {Method::kSerial, 1}, slowed).total_ps, serial.total_ps);
}

TEST(Timeline, WaitsWhereDataComesTooLate) {
  const Matmul matmul = gather_of(4, 40, 640, 1);
  const int64_t part_bytes = 10 * 640 * 2;
  GemmModel fast = kPlain;
  fast.flops_per_us *= 1000;
  const Timeline ring = predict(matmul, {Method::kRing, 4}, fast);
  const int64_t own = fast.picoseconds(10, 1, 640, 1, 2);
  ASSERT_LT(own, part_bytes);
  EXPECT_EQ(ring.total_ps, 3 * (100 + part_bytes) + own);
}

TEST(Choice, IsSerialWhereChunksDoNotPayAndNeverPredictedWorse) {
  EXPECT_NE(choose(gather_of(4, 2560, 64, 64), kPlain).method, Method::kSerial);
  GemmModel dear = kPlain;
  dear.launch_ps = int64_t{1} << 40;
  EXPECT_EQ(choose(gather_of(4, 2560, 64, 64), dear), Schedule{});
  EXPECT_EQ(choose(gather_of(1, 2560, 64, 64), kPlain), Schedule{});
  for (const int64_t rows : {4, 100, 4096}) {
    const Matmul matmul = gather_of(8, rows, 512, 512);
    const std::vector<Prediction> all = predictions(matmul, GemmModel::named("h100"));
    EXPECT_LE(predict(matmul, choose(matmul, GemmModel::named("h100")), GemmModel::named("h100")).total_ps,
              all.front().total_ps);
    EXPECT_EQ(all.front().schedule, Schedule{});
  }
}

}  // namespace
}  // namespace shardwright
