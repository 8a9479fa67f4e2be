// Attention on simulated ranks against the definition, which handles one query and one key of the whole sequence at a
// time.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "attention/block_products.h"
#include "attention/compile.h"
#include "program/attend_tiles.h"
#include "program/transfer_traffic.h"
#include "simulate/machine.h"
#include "support/error.h"

namespace shardwright {
namespace {

using Values = std::vector<double>;

constexpr AttentionMethod kAll[] = {AttentionMethod::kSerial, AttentionMethod::kRing, AttentionMethod::kGather,
                                    AttentionMethod::kUlysses};

std::vector<IntervalList> contiguous(int64_t length, int64_t ranks) {
  std::vector<IntervalList> parts;
  const int64_t rows = (length + ranks - 1) / ranks;
  for (int64_t r = 0; r < ranks; ++r) {
    const int64_t begin = std::min(length, r * rows);
    const int64_t end = std::min(length, begin + rows);
    parts.push_back(begin < end ? IntervalList{{begin, end}} : IntervalList{});
  }
  return parts;
}

// Rank r holds the r-th interval and the r-th from the end.
std::vector<IntervalList> zigzag(int64_t length, int64_t ranks) {
  const std::vector<IntervalList> halves = contiguous(length, 2 * ranks);
  std::vector<IntervalList> parts;
  for (int64_t r = 0; r < ranks; ++r) {
    IntervalList part;
    for (const IntervalList& half : {halves[r], halves[2 * ranks - 1 - r]}) {
      for (const Interval run : half) append(part, run);
    }
    parts.push_back(part);
  }
  return parts;
}

// Runs of random lengths, assigned to random ranks.
std::vector<IntervalList> scattered(int64_t length, int64_t ranks, std::mt19937& random) {
  std::vector<Interval> runs;
  for (int64_t begin = 0; begin < length;) {
    const int64_t end = std::min<int64_t>(length, begin + 1 + static_cast<int64_t>(random() % 4));
    runs.push_back({begin, end});
    begin = end;
  }
  std::shuffle(runs.begin(), runs.end(), random);
  std::vector<IntervalList> parts(ranks);
  for (const Interval run : runs) append(parts[random() % ranks], run);
  return parts;
}

Attention attention_of(std::vector<IntervalList> parts, AttentionMask mask, int64_t chunks = 0) {
  Attention a;
  a.mesh =
      std::make_shared<Mesh>(std::vector<std::string>{"cp"}, std::vector<int64_t>{static_cast<int64_t>(parts.size())});
  a.dtype = DType::kFloat64;
  a.batch = 2;
  a.heads = 4;
  a.kv_heads = 2;
  a.depth = 3;
  a.value_depth = 2;
  a.parts = std::move(parts);
  a.mask = std::move(mask);
  a.scale = 0.7;
  a.chunks = chunks;
  return a;
}

bool sees(const AttentionMask& mask, int64_t i, int64_t j) {
  if (mask.is_causal && j > i) return false;
  if (mask.window && std::abs(i - j) >= *mask.window) return false;
  int64_t end = 0;
  for (const int64_t document : mask.documents) {
    end += document;
    if ((i < end) != (j < end)) return false;
    if (i < end) break;
  }
  return true;
}

// A full tensor of shape [batch, heads, length, depth].
struct FullTensor {
  FullTensor(int64_t batch, int64_t num_heads, int64_t tokens, int64_t elements)
      : heads(num_heads), length(tokens), depth(elements), values(batch * heads * length * depth) {}

  double& at(int64_t b, int64_t h, int64_t i, int64_t d) { return values[((b * heads + h) * length + i) * depth + d]; }

  // Writes a part as returned by part().
  void set_part(const IntervalList& tokens, int64_t batch, const Values& local) {
    size_t next = 0;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (const Interval run : tokens) {
          for (int64_t i = run.begin; i < run.end; ++i) {
            for (int64_t d = 0; d < depth; ++d) at(b, h, i, d) = local[next++];
          }
        }
      }
    }
  }

  // Returns the rows that one rank holds.
  Values part(const IntervalList& tokens, int64_t batch) {
    Values local;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (const Interval run : tokens) {
          for (int64_t i = run.begin; i < run.end; ++i) {
            for (int64_t d = 0; d < depth; ++d) local.push_back(at(b, h, i, d));
          }
        }
      }
    }
    return local;
  }

  int64_t heads, length, depth;
  Values values;
};

struct Oracle {
  Oracle(const Attention& a, std::mt19937& random)
      : q(a.batch, a.heads, a.length(), a.depth),
        k(a.batch, a.kv_heads, a.key_length(), a.depth),
        v(a.batch, a.kv_heads, a.key_length(), a.value_depth),
        out(a.batch, a.heads, a.length(), a.value_depth),
        dout(out),
        lse(a.batch, a.heads, a.length(), 1),
        dq(q),
        dk(k),
        dv(v),
        mask(a.batch, a.heads, a.length(), a.key_length()) {
    std::normal_distribution<double> normal;
    for (FullTensor* whole : {&q, &k, &v, &dout}) {
      for (double& value : whole->values) value = normal(random);
    }
    if (a.mask_tensor) make_mask(*a.mask_tensor, random);
    for (int64_t b = 0; b < a.batch; ++b) {
      for (int64_t h = 0; h < a.heads; ++h) {
        for (int64_t i = 0; i < a.length(); ++i) attend(a, b, h, h / (a.heads / a.kv_heads), i, a.key_length());
      }
    }
  }

  // Makes a mask that hides all keys from every third query.
  void make_mask(const MaskTensor& form, std::mt19937& random) {
    std::normal_distribution<double> normal;
    for (double& value : mask.values) value = form.dtype == DType::kBool ? random() % 2 : normal(random);
    for (size_t at = 0; at < mask.values.size(); ++at) {
      const auto column = static_cast<int64_t>(at) % mask.depth;
      const int64_t row = static_cast<int64_t>(at) / mask.depth % mask.length;
      const int64_t head = static_cast<int64_t>(at) / mask.depth / mask.length % mask.heads;
      const int64_t batch = static_cast<int64_t>(at) / mask.depth / mask.length / mask.heads;
      double& value = mask.values[at];
      if (row % 3 == 2) value = form.dtype == DType::kBool ? 0 : -std::numeric_limits<double>::infinity();
      value = mask.at(form.batch == 1 ? 0 : batch, form.heads == 1 ? 0 : head, form.rows == 1 ? 0 : row, column);
    }
  }

  // Returns a rank's part of the mask in the form of the argument.
  Values mask_part(const MaskTensor& form, const IntervalList& tokens) {
    Values local;
    for (int64_t b = 0; b < form.batch; ++b) {
      for (int64_t h = 0; h < form.heads; ++h) {
        for (const Interval run : form.rows == 1 ? IntervalList{{0, 1}} : tokens) {
          for (int64_t i = run.begin; i < run.end; ++i) {
            for (int64_t j = 0; j < mask.depth; ++j) local.push_back(mask.at(b, h, i, j));
          }
        }
      }
    }
    return local;
  }

  void attend(const Attention& a, int64_t b, int64_t h, int64_t kv, int64_t i, int64_t n) {
    Values weights(n, 0.0);
    double sum = 0;
    for (int64_t j = 0; j < n; ++j) {
      if (!sees(a.mask, i, j)) continue;
      double score = 0;
      for (int64_t d = 0; d < a.depth; ++d) score += q.at(b, h, i, d) * k.at(b, kv, j, d);
      score *= a.scale;
      if (a.mask_tensor && a.mask_tensor->dtype != DType::kBool) score += mask.at(b, h, i, j);
      if (a.mask_tensor && a.mask_tensor->dtype == DType::kBool && mask.at(b, h, i, j) == 0) continue;
      weights[j] = std::exp(score);
      sum += weights[j];
    }
    lse.at(b, h, i, 0) = std::log(sum);
    Values dweights(n, 0.0);
    double inner = 0;
    for (int64_t j = 0; j < n; ++j) {
      if (weights[j] == 0) continue;
      weights[j] /= sum;
      for (int64_t d = 0; d < a.value_depth; ++d) {
        out.at(b, h, i, d) += weights[j] * v.at(b, kv, j, d);
        dweights[j] += dout.at(b, h, i, d) * v.at(b, kv, j, d);
        dv.at(b, kv, j, d) += weights[j] * dout.at(b, h, i, d);
      }
      inner += weights[j] * dweights[j];
    }
    for (int64_t j = 0; j < n; ++j) {
      const double dscore = weights[j] * (dweights[j] - inner) * a.scale;
      for (int64_t d = 0; d < a.depth; ++d) {
        dq.at(b, h, i, d) += dscore * k.at(b, kv, j, d);
        dk.at(b, kv, j, d) += dscore * q.at(b, h, i, d);
      }
    }
  }

  FullTensor q, k, v, out, dout, lse, dq, dk, dv;
  FullTensor mask;  // of all pairs; the depth is the number of keys
};

void expect_close(const Values& found, const Values& right, const std::string& what) {
  ASSERT_EQ(found.size(), right.size()) << what;
  for (size_t i = 0; i < found.size(); ++i) {
    if (std::isinf(right[i])) {
      ASSERT_EQ(found[i], right[i]) << what << " at " << i;
    } else {
      ASSERT_NEAR(found[i], right[i], 1e-11) << what << " at " << i;
    }
  }
}

// The results of all ranks.
struct Results {
  explicit Results(const Attention& a)
      : out(a.batch, a.heads, a.length(), a.value_depth),
        dq(a.batch, a.heads, a.length(), a.depth),
        dk(a.batch, a.kv_heads, a.key_length(), a.depth),
        dv(a.batch, a.kv_heads, a.key_length(), a.value_depth) {}

  bool operator==(const Results& other) const {
    return out.values == other.out.values && dq.values == other.dq.values && dk.values == other.dk.values &&
           dv.values == other.dv.values;
  }

  FullTensor out, dq, dk, dv;
};

// Runs forward and backward on all ranks.
Results run(Attention a, unsigned seed = 1) {
  std::mt19937 random(seed);
  Oracle whole(a, random);
  Results results(a);
  Machine forward;
  Machine backward;
  const std::vector<IntervalList> key_parts = a.parts_of_keys();
  const auto rows = [&](FullTensor& of, size_t r) { return of.part(a.parts[r], a.batch); };
  const auto key_rows = [&](FullTensor& of, size_t r) { return of.part(key_parts[r], a.batch); };
  // The forms of masks differ between ranks.
  const auto of_rank = [&](size_t r) {
    Attention mine = a;
    if (mine.mask_tensor && mine.mask_tensor->rows != 1) mine.mask_tensor->rows = a.rows(static_cast<int64_t>(r));
    return mine;
  };
  for (size_t r = 0; r < a.parts.size(); ++r) {
    const Rank rank{static_cast<int64_t>(r)};
    std::vector<Values> inputs{rows(whole.q, r), key_rows(whole.k, r), key_rows(whole.v, r)};
    std::vector<Values> of_backward = inputs;
    for (FullTensor* of : {&whole.out, &whole.dout, &whole.lse}) of_backward.push_back(rows(*of, r));
    if (a.mask_tensor) inputs.push_back(whole.mask_part(*a.mask_tensor, a.parts[r]));
    if (a.mask_tensor) of_backward.push_back(inputs.back());
    forward.add(rank, compile_attention(of_rank(r), rank), inputs);
    backward.add(rank, compile_attention_backward(of_rank(r), rank), of_backward);
  }
  forward.run();
  backward.run();
  for (size_t r = 0; r < a.parts.size(); ++r) {
    const Rank rank{static_cast<int64_t>(r)};
    const std::string where = concat(method_name(a.method), " on rank ", r, " of ", a.parts.size());
    expect_close(forward.output(rank, 0), rows(whole.out, r), concat("out, ", where));
    expect_close(forward.output(rank, 1), rows(whole.lse, r), concat("lse, ", where));
    expect_close(backward.output(rank, 0), rows(whole.dq, r), concat("dq, ", where));
    expect_close(backward.output(rank, 1), key_rows(whole.dk, r), concat("dk, ", where));
    expect_close(backward.output(rank, 2), key_rows(whole.dv, r), concat("dv, ", where));
    EXPECT_EQ(forward.peak_bytes(rank), compile_attention(of_rank(r), rank).peak_bytes());
    EXPECT_EQ(backward.peak_bytes(rank), compile_attention_backward(of_rank(r), rank).peak_bytes());
    results.out.set_part(a.parts[r], a.batch, forward.output(rank, 0));
    results.dq.set_part(a.parts[r], a.batch, backward.output(rank, 0));
    results.dk.set_part(key_parts[r], a.batch, backward.output(rank, 1));
    results.dv.set_part(key_parts[r], a.batch, backward.output(rank, 2));
  }
  return results;
}

TEST(Attention, EveryMethodMatchesTheDefinition) {
  for (const AttentionMethod method : kAll) {
    for (const int64_t ranks : {1, 2, 3, 4}) {
      for (const AttentionMask& mask :
           {AttentionMask{}, AttentionMask{true}, AttentionMask{true, 3}, AttentionMask{false, 2},
            AttentionMask{true, std::nullopt, {4, 0, 6, 3}}, AttentionMask{false, 3, {1, 12}}}) {
        for (const auto& parts : {contiguous(13, ranks), zigzag(13, ranks)}) {
          Attention a = attention_of(parts, mask);
          a.method = method;
          run(a);
        }
      }
    }
  }
}

TEST(Attention, RanksMayHoldAnyParts) {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    const auto ranks = static_cast<int64_t>(random() % 5 + 1);
    const auto length = static_cast<int64_t>(random() % 18);
    AttentionMask mask;
    mask.is_causal = random() % 2 == 0;
    if (random() % 2 == 0) mask.window = 1 + random() % 6;
    if (random() % 2 == 0) mask.documents = {length / 3, 0, length - length / 3};
    Attention a = attention_of(scattered(length, ranks, random), mask, static_cast<int64_t>(random() % 6));
    a.heads = 6;
    a.kv_heads = random() % 2 == 0 ? 1 : 3;
    a.batch = 1 + static_cast<int64_t>(random() % 2);
    a.method = kAll[random() % 4];
    const auto keys = static_cast<int64_t>(random() % 18);
    if (a.mask.documents.empty() && random() % 2 == 0) a.key_parts = scattered(keys, ranks, random);
    SCOPED_TRACE(concat("round ", round));
    run(a, round);
  }
}

// Parts that begin and end at the borders of chunks, in any layout. There are fewer heads of keys than ranks.
TEST(Attention, ResultsAndGradientsAreBitwiseTheSameForAnyNumberOfRanksLayoutAndMethod) {
  for (const auto& [mask, num_keys] : {std::pair(AttentionMask{}, 12), std::pair(AttentionMask{true, 7}, 16)}) {
    std::optional<Results> first;
    for (const int64_t ranks : {1, 2, 3, 4, 6}) {
      for (const auto& parts : {contiguous(16, ranks), zigzag(16, ranks)}) {
        for (const AttentionMethod method : kAll) {
          Attention a = attention_of(parts, mask, 16);
          a.method = method;
          a.batch = 1;
          if (num_keys != a.length()) a.key_parts = contiguous(num_keys, ranks);
          const Results found = run(a);
          if (!first) first = found;
          EXPECT_TRUE(found == *first) << method_name(method) << " on " << ranks;
        }
      }
    }
  }
}

// Each rank holds 2^n consecutive blocks of 2 rows, so it sends one sum per block of keys, as without chunks.
TEST(Attention, ChunkedKeyGradientsAreSentOnceIfRanksHoldWholeTreeNodes) {
  const auto received = [](int64_t chunks, const std::vector<IntervalList>& parts) {
    Attention a = attention_of(parts, {}, chunks);
    a.method = AttentionMethod::kRing;
    const Program program = compile_attention_backward(a, Rank{1});
    int64_t bytes = 0;
    for (const Instruction& one : program.instructions) bytes += traffic_of(program, one.operation).received_bytes;
    return bytes;
  };
  EXPECT_EQ(received(16, contiguous(32, 4)), received(0, contiguous(32, 4)));
  // The two runs of a rank are not one node of the tree, so both of their sums are sent.
  EXPECT_GT(received(16, zigzag(32, 4)), received(0, zigzag(32, 4)));
}

TEST(Attention, CountsBlockProductsPerRank) {
  for (const int64_t ranks : {1, 2, 3, 4, 8}) {
    const BlockProducts causal(attention_of(contiguous(16 * ranks, ranks), {true}));
    const BlockProducts balanced(attention_of(zigzag(16 * ranks, ranks), {true}, 2 * ranks));
    int64_t all = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      const BlockCounts mine = count_blocks(causal, r);
      EXPECT_EQ(mine.products(), r + 1);
      EXPECT_EQ(mine.triangles, 1);
      EXPECT_EQ(mine.others, 0);
      all += mine.products();
      // The r-th block and the r-th from the end, of 2 W blocks, see r + 1 and 2 W - r blocks, one of them as a
      // triangle.
      EXPECT_EQ(count_blocks(balanced, r).products(), 2 * ranks + 1);
      EXPECT_EQ(count_blocks(balanced, r).triangles, 2);
      EXPECT_EQ(count_blocks(balanced, r).pairs, count_blocks(balanced, 0).pairs);
    }
    EXPECT_EQ(all, ranks * (ranks + 1) / 2);
  }
}

TEST(Attention, BlocksAreMultipliedIfSomePairIsVisible) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    AttentionMask mask;
    const int64_t length = 1 + static_cast<int64_t>(random() % 20);
    mask.is_causal = random() % 2 == 0;
    if (random() % 2 == 0) mask.window = 1 + random() % 9;
    if (random() % 2 == 0) mask.documents = {length / 2, length - length / 2};
    const Attention a = attention_of(scattered(length, 3, random), mask, static_cast<int64_t>(random() % 7));
    const BlockProducts products(a);
    for (int q = 0; q < products.queries().size(); ++q) {
      for (int k = 0; k < products.keys().size(); ++k) {
        const Interval of_q = products.queries()[q].tokens;
        const Interval of_k = products.keys()[k].tokens;
        int64_t pairs = 0;
        bool is_triangle = of_q == of_k;
        for (int64_t i = of_q.begin; i < of_q.end; ++i) {
          for (int64_t j = of_k.begin; j < of_k.end; ++j) {
            pairs += sees(mask, i, j) ? 1 : 0;
            is_triangle = is_triangle && sees(mask, i, j) == (j <= i);
            EXPECT_EQ(products.band(q, k).sees(i - of_q.begin, j - of_k.begin), sees(mask, i, j));
          }
        }
        const BlockShape shape = products.shape(q, k);
        const int64_t rows = products.queries()[q].rows();
        const int64_t columns = products.keys()[k].rows();
        EXPECT_EQ(visible_pairs(products.band(q, k), rows, columns), pairs);
        EXPECT_EQ(shape == BlockShape::kSkip, pairs == 0);
        const std::optional<VisiblePart> part = visible_part(products.band(q, k), rows, columns);
        EXPECT_EQ(shape == BlockShape::kFull, part && pairs == part->rows * part->columns);
        if (is_triangle && rows > 1) {
          EXPECT_EQ(shape, BlockShape::kTriangle);
        }
        EXPECT_EQ(products.overlap(q, k), pairs > 0);
      }
    }
  }
}

TEST(Attention, WindowsMayBeOfAnyWidth) {
  for (const int64_t window : {int64_t{12}, int64_t{13}, Band::kMax, std::numeric_limits<int64_t>::max()}) {
    const BlockProducts wide(attention_of(zigzag(12, 3), {true, window}));
    const BlockProducts all(attention_of(zigzag(12, 3), {true}));
    for (int64_t r = 0; r < 3; ++r) EXPECT_EQ(count_blocks(wide, r).pairs, count_blocks(all, r).pairs) << window;
  }
}

// Besides its own tensors, a rank of a ring holds two parts of keys and values, for any number of ranks.
TEST(Attention, ARingNeverHoldsAllKeys) {
  for (const int64_t ranks : {4, 8}) {
    Attention a = attention_of(contiguous(64 * ranks, ranks), {});
    a.dtype = DType::kFloat32;
    a.heads = a.kv_heads = 1;
    a.batch = 1;
    a.depth = a.value_depth = 16;
    a.method = AttentionMethod::kRing;
    const int64_t part_bytes = 64 * 16 * 4;
    const int64_t ring = compile_attention(a, Rank{1}).peak_bytes();
    a.method = AttentionMethod::kGather;
    const int64_t gather = compile_attention(a, Rank{1}).peak_bytes();
    EXPECT_EQ(gather - ring, (2 * (ranks - 1) - 4) * part_bytes);
    const Attention alone = attention_of(contiguous(64, 1), {});
    EXPECT_LT(ring, 14 * part_bytes);
    EXPECT_GE(gather, 2 * (ranks - 1) * part_bytes);
  }
}

TEST(Attention, SendsOnlyVisibleKeys) {
  Attention a = attention_of(contiguous(64, 4), {true, 5});
  a.method = AttentionMethod::kRing;
  a.chunks = 16;  // blocks of four rows
  Machine machine;
  std::mt19937 random(1);
  Oracle whole(a, random);
  for (int64_t r = 0; r < 4; ++r) {
    const auto part = [&](FullTensor& of) { return of.part(a.parts[r], a.batch); };
    machine.add(Rank{r}, compile_attention(a, Rank{r}), {part(whole.q), part(whole.k), part(whole.v)});
  }
  machine.run();
  const int64_t row_bytes = a.batch * a.kv_heads * (a.depth + a.value_depth) * 8;  // of k and v
  EXPECT_EQ(machine.received_bytes(Rank{0}), 0);
  for (int64_t r = 1; r < 4; ++r) EXPECT_EQ(machine.received_bytes(Rank{r}), 4 * row_bytes);
}

Attention on_nodes(Attention a, int64_t ranks_per_node) {
  a.method = AttentionMethod::kTwoLevel;
  a.ranks_per_node = ranks_per_node;
  return a;
}

TEST(Attention, MasksMayBeTensorsOfAnyBroadcastableShape) {
  std::mt19937 random(11);
  for (const int64_t ranks : {1, 3}) {
    for (const auto& [batch, heads, rows] : {std::tuple(1, 1, 11), std::tuple(2, 1, 1), std::tuple(1, 4, 11)}) {
      for (const DType dtype : {DType::kBool, DType::kFloat32}) {
        Attention a = attention_of(scattered(11, ranks, random), {});
        a.key_parts = scattered(7, ranks, random);
        a.mask_tensor = MaskTensor{dtype, batch, heads, rows, 7};
        a.method = kAll[random() % 3];
        run(a);
      }
    }
  }
}

// Only sums of gradients are sent.
TEST(Attention, KeysMayBeReplicatedOnEveryRank) {
  std::mt19937 random(13);
  for (const int64_t ranks : {1, 2, 3}) {
    for (const int64_t chunks : {0, 4}) {
      Attention a = attention_of(scattered(11, ranks, random), {true}, chunks);
      a.key_parts.assign(ranks, {{0, 9}});
      a.keys_are_whole = ranks > 1;
      for (const AttentionMethod method : {AttentionMethod::kSerial, AttentionMethod::kRing}) {
        a.method = method;
        run(a);
        const Program forward = compile_attention(a, Rank{0});
        for (const Instruction& one : forward.instructions) EXPECT_FALSE(is_communication(one.operation));
      }
    }
  }
}

// The peak includes the bias of blocks that are neither full nor triangles, which is bounded, and padding.
TEST(Attention, PeakMemoryIncludesTileBiasAndPaddedOperands) {
  const auto peak = [](int64_t rows, int64_t window, int64_t value_depth) {
    Attention a = attention_of({{{0, rows}}}, {true, window});
    a.dtype = DType::kFloat32;
    a.batch = a.heads = a.kv_heads = 1;
    a.depth = 8;
    a.value_depth = value_depth;
    a.method = AttentionMethod::kSerial;
    return compile_attention(a, Rank{0}).peak_bytes();
  };
  const int64_t rows = 8192;
  const int64_t without = peak(rows, rows, 8);
  EXPECT_GT(peak(rows, rows / 2, 8), without);
  EXPECT_LE(peak(rows, rows / 2, 8), without + kMostBiasBytes);
  EXPECT_LT(peak(64, 3, 8) - peak(64, 64, 8), 2 * 64 * 64 * 4 + 1);
  EXPECT_EQ(peak(rows, rows, 4), rows * (4 + 1 + 8) * 4);  // the result, its lse, and values with the depth of keys
}

TEST(Attention, TilesCoverEachVisiblePairOnce) {
  std::mt19937 random(17);
  for (int round = 0; round < 40; ++round) {
    Attend product;
    AttendSizes& s = product.sizes;
    s = {1, 1, 1, 1 + static_cast<int64_t>(random() % 60), 1 + static_cast<int64_t>(random() % 60), 8, 8};
    product.band.least = static_cast<int64_t>(random() % 50) - 40;
    if (random() % 2 == 0) product.band.most = product.band.least + static_cast<int64_t>(random() % 30);
    const AttendItemBytes large{4, kMostBiasBytes / 400};  // tiles of about 200 pairs
    int64_t pairs = 0;
    int64_t next_row = 0;
    for (const VisiblePart& tile : tiles_of(product, large)) {
      EXPECT_GE(tile.first_row, next_row);
      next_row = tile.first_row + tile.rows;
      for (int64_t i = 0; i < tile.rows; ++i) {
        for (int64_t j = 0; j < tile.columns; ++j) {
          const bool is_seen = product.band.sees(tile.first_row + i, tile.first_column + j);
          EXPECT_EQ(tile.band.sees(i, j), is_seen);
          pairs += is_seen ? 1 : 0;
        }
      }
    }
    EXPECT_EQ(pairs, visible_pairs(product.band, s.rows, s.columns));
  }
}

TEST(Attention, TwoLevelMethodMatchesTheDefinition) {
  std::mt19937 random(5);
  for (const auto& [ranks, per_node] : {std::pair(4, 2), std::pair(8, 2), std::pair(8, 4), std::pair(6, 3)}) {
    for (const AttentionMask& mask :
         {AttentionMask{}, AttentionMask{true, 3}, AttentionMask{true, std::nullopt, {4, 0, 6, 9}}}) {
      for (const auto& parts : {contiguous(19, ranks), zigzag(19, ranks), scattered(19, ranks, random)}) {
        Attention a = attention_of(parts, mask);
        a.heads = 5 * (per_node - 1);  // shares of the ranks of a node differ, some are parts of a head of keys
        a.kv_heads = per_node - 1;
        if (mask.documents.empty()) a.key_parts = scattered(7, ranks, random);
        run(on_nodes(a, per_node));
      }
    }
  }
}

TEST(Attention, TwoLevelMethodIsBitwiseEqualToRing) {
  for (const AttentionMask& mask : {AttentionMask{}, AttentionMask{true}}) {
    Attention a = attention_of(zigzag(24, 4), mask, 12);
    a.batch = 1;
    a.method = AttentionMethod::kRing;
    const Results right = run(a);
    EXPECT_TRUE(run(on_nodes(a, 2)) == right);
  }
}

// Returns the number of elements that a rank receives in transfers along one dim of the mesh of programs.
int64_t received_along(const Program& program, int mesh_dim) {
  int64_t count = 0;
  for (const Instruction& instruction : program.instructions) {
    const auto* move = std::get_if<SendReceive>(&instruction.operation);
    if (move == nullptr || !(program.groups[move->group].mesh_dims == MeshDimSet::single(mesh_dim))) continue;
    for (const auto& receive : move->receives) count += receive.range.count;
  }
  return count;
}

TEST(Attention, TwoLevelMethodSendsKeysToEachNodeOnce) {
  Attention a = attention_of(contiguous(64, 8), {});
  a.heads = a.kv_heads = 4;
  const int64_t of_a_part = a.batch * a.kv_heads * 8 * (a.depth + a.value_depth);  // of k and v
  a.method = AttentionMethod::kRing;
  EXPECT_EQ(received_along(compile_attention(a, Rank{3}), 0), 7 * of_a_part);
  // Each rank receives a quarter of the heads of the four parts of the other node.
  EXPECT_EQ(received_along(compile_attention(on_nodes(a, 4), Rank{3}), 0), of_a_part);
}

TEST(Attention, NodesAreEqualGroupsOfNeighboringRanks) {
  Topology topology = Topology::named("gloo-local");
  topology.ranks_per_node = 2;
  const auto per_node = [&](const std::vector<int64_t>& ranks) {
    return ranks_per_node_of(Mesh({"cp"}, {static_cast<int64_t>(ranks.size())}, ranks), topology);
  };
  EXPECT_EQ(per_node({0, 1, 2, 3}), 2);
  EXPECT_EQ(per_node({3, 2, 0, 1}), 2);
  EXPECT_EQ(per_node({0, 2, 4, 6}), 1);
  EXPECT_EQ(per_node({0, 1, 2}), 0);
  EXPECT_EQ(per_node({0, 1, 2, 4}), 0);
  EXPECT_EQ(per_node({0, 2, 1, 3}), 0);
  EXPECT_EQ(per_node({1, 2, 3, 4}), 0);
  topology.ranks_per_node = 0;
  EXPECT_EQ(per_node({0, 1, 2, 3}), 0);
  EXPECT_THROW(check(on_nodes(attention_of(contiguous(8, 4), {}), 4)), UserError);
}

TEST(Attention, RejectsInvalidArguments) {
  const auto message = [](Attention a) -> std::string {
    try {
      check(a);
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  };
  Attention a = attention_of(contiguous(8, 2), {});
  EXPECT_EQ(message(a), "");
  a.kv_heads = 3;
  EXPECT_NE(message(a).find("divides the heads of q (4), got 3"), std::string::npos);
  a = attention_of({{{0, 4}}, {{3, 8}}}, {});
  EXPECT_NE(message(a).find("layout must have each token"), std::string::npos);
  a = attention_of({{{0, 4}}, {{5, 8}}}, {});
  EXPECT_NE(message(a).find("on exactly one rank, got the tokens [5, 8) after the tokens [0, 4)"), std::string::npos);
  a = attention_of(contiguous(8, 2), {false, 0});
  EXPECT_NE(message(a).find("window must be at least 1 (each query sees its own token), got 0"), std::string::npos);
  a = attention_of(contiguous(8, 2), {false, std::nullopt, {3, 4}});
  EXPECT_NE(message(a).find("sum to the length of the sequence (8), got 7"), std::string::npos);
  const int64_t quarter = int64_t{1} << 62;  // four of them sum to 0 in 64 bits
  a = attention_of(contiguous(8, 2), {false, std::nullopt, {quarter, quarter, quarter, quarter, 8}});
  EXPECT_NE(message(a).find("documents must have lengths in [0, 8], got "), std::string::npos);
  a = attention_of(contiguous(8, 2), {});
  a.dtype = DType::kInt32;
  EXPECT_NE(message(a).find("q must have dtype float32, bfloat16, float16 or float64, got int32"), std::string::npos);
  a = attention_of(contiguous(8, 2), {false, std::nullopt, {4, 4}});
  a.key_parts = contiguous(6, 2);
  EXPECT_NE(message(a).find("documents must be left out"), std::string::npos);
  a.mask.documents.clear();
  a.mask_tensor = MaskTensor{DType::kBool, 1, 1, 4, 8};
  EXPECT_NE(message(a).find("mask must be broadcastable to [2, 4, this rank's rows of q, 6]"), std::string::npos);
  a.mask_tensor->columns = 6;
  EXPECT_EQ(message(a), "");
  a.mask.is_causal = true;
  EXPECT_NE(message(a).find("mask must be None or a sw.attention.Mask if is_causal is True"), std::string::npos);
  a.mask.is_causal = false;
  a.method = AttentionMethod::kUlysses;
  EXPECT_NE(message(a).find("method must be 'auto', 'ring', 'gather' or 'serial' with a mask"), std::string::npos);
}

}  // namespace
}  // namespace shardwright
