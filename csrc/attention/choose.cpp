#include "attention/choose.h"

#include <algorithm>

#include "attention/block_products.h"
#include "attention/compile.h"
#include "products/timeline.h"
#include "program/transfer_traffic.h"
#include "support/error.h"
#include "support/text.h"

namespace shardwright {
namespace {

constexpr int64_t kSameTimePercent = 2;  // of methods whose times differ by at most this, the least memory decides
constexpr int64_t kMostRanksShown = 16;  // maximum number of ranks whose block products describe() shows
constexpr int64_t kPicosecondsPerMicrosecond = 1'000'000;

// Returns the positions of the ranks whose programs are timed.
std::vector<int64_t> examined_positions(int64_t num_ranks) {
  if (num_ranks > 4) return {0, num_ranks / 2, num_ranks - 1};
  std::vector<int64_t> all;
  for (int64_t p = 0; p < num_ranks; ++p) all.push_back(p);
  return all;
}

// Returns the forecast of one method.
AttentionForecast forecast(Attention attention, AttentionMethod method, const Topology& topology,
                           const GemmModel& model, bool with_backward) {
  attention.method = method;
  AttentionForecast maxima{method};
  const Mesh& mesh = *attention.mesh;
  const MeshPtr mesh_of_groups = mesh_of_programs(attention);
  for (const int64_t position : examined_positions(mesh.size())) {
    // Assumes a mask of full size instead of this rank's mask, so that all ranks get the same forecast.
    if (attention.mask_tensor) {
      attention.mask_tensor = MaskTensor{DType::kBool, 1, 1, attention.rows(position), attention.key_length()};
    }
    const Rank rank = mesh.rank_at(Position{position});
    const Program forward = compile_attention(attention, rank);
    const Timeline timeline = predict(forward, topology, *mesh_of_groups, model);
    maxima.forward_ps = std::max(maxima.forward_ps, timeline.total_ps);
    maxima.compute_ps = std::max(maxima.compute_ps, timeline.gemm_ps);
    maxima.peak_bytes = std::max(maxima.peak_bytes, forward.peak_bytes());
    int64_t received = 0;
    for (const Instruction& instruction : forward.instructions) {
      received += traffic_of(forward, instruction.operation).received_bytes;
    }
    maxima.received_bytes = std::max(maxima.received_bytes, received);
    if (!with_backward) continue;
    const Program backward = compile_attention_backward(attention, rank);
    maxima.backward_ps = std::max(maxima.backward_ps, predict(backward, topology, *mesh_of_groups, model).total_ps);
  }
  return maxima;
}

// Returns the tokens of a part: "[0, 4) [12, 16)", or "nothing".
std::string runs_text(const IntervalList& part) {
  std::vector<std::string> runs;
  for (const Interval run : part) runs.push_back(concat("[", run.begin, ", ", run.end, ")"));
  return runs.empty() ? "nothing" : join(runs, " ");
}

// Returns the sizes of keys and values that differ from the sizes of queries: "64 tokens of keys, values of depth 32,
// ".
std::string keys_text(const Attention& a) {
  std::string text;
  if (!a.key_parts.empty()) text += concat(a.key_length(), " tokens of keys, ");
  if (a.value_depth != a.depth) text += concat("values of depth ", a.value_depth, ", ");
  return text;
}

// Returns picoseconds as microseconds, rounded down: "12 us".
std::string microseconds(int64_t ps) { return concat(ps / kPicosecondsPerMicrosecond, " us"); }

}  // namespace

std::vector<AttentionForecast> forecasts(const Attention& attention, const Topology& topology, const GemmModel& model,
                                         bool with_backward) {
  Attention attention_with_nodes = attention;
  attention_with_nodes.ranks_per_node = ranks_per_node_of(*attention.mesh, topology);
  std::vector<AttentionMethod> methods{AttentionMethod::kSerial};
  const bool moves_keys = attention_with_nodes.mesh->size() > 1 && !attention_with_nodes.keys_are_whole;
  if (moves_keys) methods.insert(methods.end(), {AttentionMethod::kRing, AttentionMethod::kGather});
  if (moves_keys && !attention_with_nodes.mask_tensor) {
    methods.push_back(AttentionMethod::kUlysses);
    if (attention_with_nodes.supports_two_level()) methods.push_back(AttentionMethod::kTwoLevel);
  }
  std::vector<AttentionForecast> all;
  for (const AttentionMethod method : methods) {
    all.push_back(forecast(attention_with_nodes, method, topology, model, with_backward));
  }
  return all;
}

AttentionMethod choose(const Attention& attention, const Topology& topology, const GemmModel& model,
                       bool with_backward) {
  const std::vector<AttentionForecast> all = forecasts(attention, topology, model, with_backward);
  const auto best = std::min_element(
      all.begin(), all.end(),
      [](const AttentionForecast& a, const AttentionForecast& b) { return a.total_ps() < b.total_ps(); });
  const int64_t serial = all.front().total_ps();
  if (serial - best->total_ps() < serial / 100 * kLeastGainPercent) return all.front().method;
  const int64_t longest_ps = best->total_ps() + best->total_ps() / 100 * kSameTimePercent;
  AttentionForecast chosen = *best;
  for (const AttentionForecast& forecast : all) {
    if (forecast.total_ps() <= longest_ps && forecast.peak_bytes < chosen.peak_bytes) chosen = forecast;
  }
  return chosen.method;
}

std::string describe(const Attention& attention, const Topology& topology, const GemmModel& model) {
  check(attention);
  const Attention& a = attention;
  std::string text = concat("attention of ", a.dtype.name(), "[", a.batch, ", ", a.heads, ", ", a.length(), ", ",
                            a.depth, "] to ", count_text(a.kv_heads, "head"), " of keys, ", keys_text(a), mask_text(a),
                            ", over ", a.mesh->to_string(), ": ", method_name(a.method), "\n");
  const BlockProducts products(a);
  const int64_t num_ranks = a.mesh->size();
  for (int64_t p = 0; p < std::min(num_ranks, kMostRanksShown); ++p) {
    const BlockCounts counts = count_blocks(products, p);
    text += concat("  rank ", a.mesh->rank_at(Position{p}), " holds ", runs_text(a.parts[p]),
                   a.key_parts.empty() ? "" : concat(" and the keys ", runs_text(a.key_parts[p])), ": ",
                   count_text(counts.products(), "block product"), " (", counts.full, " full, ", counts.triangles,
                   " triangles, ", counts.others, " others), ", counts.pairs, " pairs\n");
  }
  if (num_ranks > kMostRanksShown) text += concat("  and ", num_ranks - kMostRanksShown, " more ranks\n");
  for (const AttentionForecast& forecast : forecasts(a, topology, model, /*with_backward=*/true)) {
    text += concat("  ", method_name(forecast.method), ": forward ", microseconds(forecast.forward_ps), " (",
                   microseconds(forecast.compute_ps), " of compute), backward ", microseconds(forecast.backward_ps),
                   ", at most ", forecast.received_bytes, " bytes received and ", forecast.peak_bytes,
                   " allocated per rank", forecast.method == a.method ? " <- this one" : "", "\n");
  }
  return text;
}

}  // namespace shardwright
