// The choice of a method of attention, and its predicted time.
#include <gtest/gtest.h>

#include <map>
#include <utility>
#include <variant>

#include "attention/choose.h"
#include "attention/compile.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr int64_t kMicrosecond = 1'000'000;

// Attention with contiguous parts of one sequence of float32, not causal.
Attention attention_of(int64_t ranks, int64_t length, int64_t heads = 8, int64_t depth = 64) {
  Attention a;
  a.mesh = std::make_shared<Mesh>(std::vector<std::string>{"cp"}, std::vector<int64_t>{ranks});
  a.batch = 1;
  a.heads = a.kv_heads = heads;
  a.depth = a.value_depth = depth;
  for (int64_t r = 0; r < ranks; ++r) a.parts.push_back({{length / ranks * r, length / ranks * (r + 1)}});
  return a;
}

// A model and a topology in which products, bytes and messages take no time.
const GemmModel kNothing{"host", 1, 16, 16, int64_t{1} << 60, 0, 0, 0};
const Topology kNoLinks{"none", 0, 0, 0, {0, 0}, {0, 0}, {}};

TEST(AttentionChoice, CountsTheDelayOfChunksIfProductsOverlapTransfers) {
  GemmModel model = kNothing;
  model.chunk_ps = 1000;
  Topology nodes = kNoLinks;
  nodes.ranks_per_node = 2;
  // Chunks of a forward and of a backward on 4 ranks. A ring sends keys three times, and gradients of keys back as
  // often, the last ones after all products. A gather sends keys once. Ulysses sends heads before all products, and
  // their gradients after them.
  const std::map<AttentionMethod, std::pair<int64_t, int64_t>> expected{{AttentionMethod::kSerial, {0, 0}},
                                                                        {AttentionMethod::kRing, {3, 5}},
                                                                        {AttentionMethod::kGather, {1, 1}},
                                                                        {AttentionMethod::kUlysses, {3, 0}},
                                                                        {AttentionMethod::kTwoLevel, {1, 1}}};
  const auto found = forecasts(attention_of(4, 64), nodes, model, /*with_backward=*/true);
  ASSERT_EQ(found.size(), expected.size());
  for (const AttentionForecast& one : found) {
    EXPECT_EQ(one.forward_ps, 1000 * expected.at(one.method).first) << method_name(one.method);
    EXPECT_EQ(one.backward_ps, 1000 * expected.at(one.method).second) << method_name(one.method);
  }
}

// Checks that a transfer belongs to a chunk exactly if a product lies between its start and its end.
void check_chunks(const Program& program) {
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    if (!std::holds_alternative<SendReceive>(program.instructions[i].operation)) continue;
    bool is_beside_a_product = false;
    for (size_t j = i + 1; j < program.instructions.size(); ++j) {
      const Operation& operation = program.instructions[j].operation;
      if (const auto* wait = std::get_if<Wait>(&operation); wait != nullptr && wait->ticket == static_cast<int>(i))
        break;
      is_beside_a_product = is_beside_a_product || std::holds_alternative<Attend>(operation) ||
                            std::holds_alternative<AttendBackward>(operation);
    }
    EXPECT_EQ(program.instructions[i].chunk >= 0, is_beside_a_product) << "instruction " << i;
  }
}

TEST(AttentionChoice, TransfersBelongToAChunkIfProductsOverlapThem) {
  for (const int64_t ranks : {2, 3, 4, 8}) {
    Attention attention = attention_of(ranks, 8 * ranks, /*heads=*/ranks);
    for (const AttentionMethod method : {AttentionMethod::kSerial, AttentionMethod::kRing, AttentionMethod::kGather,
                                         AttentionMethod::kUlysses, AttentionMethod::kTwoLevel}) {
      attention.method = method;
      attention.ranks_per_node = method == AttentionMethod::kTwoLevel ? 2 : 0;
      if (method == AttentionMethod::kTwoLevel && (ranks < 4 || ranks % 2 != 0)) continue;
      for (int64_t p = 0; p < ranks; ++p) {
        SCOPED_TRACE(concat(method_name(method), ", rank ", p, " of ", ranks));
        check_chunks(compile_attention(attention, attention.mesh->rank_at(Position{p})));
        check_chunks(compile_attention_backward(attention, attention.mesh->rank_at(Position{p})));
      }
    }
  }
}

// The model that calibrate finds on four ranks of two cores: transfers alongside products end milliseconds later. If a
// transfer takes less than that, overlap gains nothing; over slower links, and with more to send, it does.
TEST(AttentionChoice, IsSerialIfTheDelayOfAChunkExceedsTransfers) {
  GemmModel model = GemmModel::named("cpu");
  model.chunk_ps = 4'650 * kMicrosecond;
  Topology topology{"busy", 0, 630 * kMicrosecond, 110'000, {60 * kMicrosecond, kMicrosecond}, {}, {}};
  for (const bool with_backward : {false, true}) {
    for (const int64_t length : {16, 64, 256}) {
      EXPECT_EQ(choose(attention_of(4, length), topology, model, with_backward), AttentionMethod::kSerial)
          << length << " tokens" << (with_backward ? ", with backward" : "");
    }
    topology.inside.ps_per_kib = 20 * kMicrosecond;
    EXPECT_NE(choose(attention_of(4, 2048), topology, model, with_backward), AttentionMethod::kSerial);
    topology.inside.ps_per_kib = kMicrosecond;
  }
}

}  // namespace
}  // namespace shardwright
