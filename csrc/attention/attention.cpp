#include "attention/attention.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>

#include "support/error.h"

namespace shardwright {
namespace {

constexpr AttentionMethod kMethods[] = {AttentionMethod::kSerial, AttentionMethod::kRing, AttentionMethod::kGather,
                                        AttentionMethod::kUlysses, AttentionMethod::kTwoLevel};

// Returns the number of tokens in all parts.
int64_t length_of(const std::vector<IntervalList>& parts) {
  int64_t total = 0;
  for (const IntervalList& part : parts) total += shardwright::length(part);
  return total;
}

// Throws UserError unless there is one part for each rank of the mesh.
void check_count(const std::vector<IntervalList>& parts, const Mesh& mesh, const char* argument) {
  check_user(static_cast<int64_t>(parts.size()) == mesh.size(), argument,
             " must have one part of the sequence for each of ", mesh.size(), " ranks, got ", parts.size());
}

// Throws UserError unless the parts are a partition of a sequence that begins at token 0.
void check_parts(const std::vector<IntervalList>& parts, const Mesh& mesh, const char* argument) {
  check_count(parts, mesh, argument);
  std::vector<Interval> all;
  for (const IntervalList& part : parts) all.insert(all.end(), part.begin(), part.end());
  int64_t next = 0;
  for (const Interval& run : sorted_by_begin(all)) {
    check_user(run.begin == next && run.end > run.begin, argument,
               " must have each token of the sequence on exactly one rank, got the tokens [", run.begin, ", ", run.end,
               ") after the tokens [0, ", next, ")");
    next = run.end;
  }
}

// Throws UserError unless every rank holds all keys, in order, and the method supports it.
void check_whole_keys(const Attention& attention) {
  check_count(attention.key_parts, *attention.mesh, "kv_layout");
  const int64_t total = attention.key_length();
  for (size_t p = 0; p < attention.key_parts.size(); ++p) {
    const IntervalList& part = attention.key_parts[p];
    const bool is_all = part.size() == 1 && part[0].begin == 0 && part[0].end == total;
    check_user(is_all || (part.empty() && total == 0), "kv_layout must have all ", total,
               " keys in ascending order on every rank, got other keys at position ", p, " of the mesh");
  }
  check_user(!exchanges_heads(attention.method),
             "method must be 'auto', 'ring', 'gather' or 'serial' where every rank holds all keys, got '",
             method_name(attention.method), "'");
}

// Throws UserError unless dtype, shape and method support the mask tensor, which the attention must have.
void check_mask_tensor(const Attention& attention) {
  const MaskTensor& mask = *attention.mask_tensor;
  check_user(mask.dtype == DType::kBool || mask.dtype == DType::kFloat32 || mask.dtype == attention.dtype,
             "mask must have dtype bool, float32 or that of q (", attention.dtype.name(), "), got ", mask.dtype.name());
  const bool fits = (mask.batch == 1 || mask.batch == attention.batch) &&
                    (mask.heads == 1 || mask.heads == attention.heads) &&
                    (mask.columns == 1 || mask.columns == attention.key_length());
  check_user(fits, "mask must be broadcastable to [", attention.batch, ", ", attention.heads,
             ", this rank's rows of q, ", attention.key_length(), "], got [", join(mask.shape()), "]");
  check_user(mask_text(attention) == "a tensor",
             "mask must be None or a sw.attention.Mask if is_causal is True, got a tensor");
  check_user(!exchanges_heads(attention.method),
             "method must be 'auto', 'ring', 'gather' or 'serial' with a mask that is a tensor, got '",
             method_name(attention.method), "'");
}

// Throws UserError for an invalid window or documents. `total` and `total_keys` are the lengths of the sequences.
void check_mask(const AttentionMask& mask, int64_t total, int64_t total_keys) {
  check_user(mask.documents.empty() || total == total_keys,
             "documents must be left out if q and k have sequences of different lengths (", total, " and ", total_keys,
             "), got ", mask.documents.size(), " documents");
  check_argument(!mask.window || *mask.window >= 1, "window", "at least 1 (each query sees its own token)",
                 mask.window.value_or(0));
  for (const int64_t document : mask.documents) {
    check_user(document >= 0 && document <= total, "documents must have lengths ", InRange{0, total}, ", got ",
               document);
  }
  const int64_t sum = std::accumulate(mask.documents.begin(), mask.documents.end(), int64_t{0});
  check_user(mask.documents.empty() || sum == total,
             "documents must have lengths that sum to the length of the sequence (", total, "), got ", sum);
}

}  // namespace

const char* method_name(AttentionMethod method) {
  switch (method) {
    case AttentionMethod::kSerial:
      return "serial";
    case AttentionMethod::kRing:
      return "ring";
    case AttentionMethod::kGather:
      return "gather";
    case AttentionMethod::kUlysses:
      return "ulysses";
    case AttentionMethod::kTwoLevel:
      return "two_level";
  }
  return "";
}

AttentionMethod parse_attention_method(const std::string& name) {
  for (const AttentionMethod method : kMethods) {
    if (name == method_name(method)) return method;
  }
  throw UserError(concat("method must be one of auto, ring, gather, ulysses, two_level, serial, got '", name, "'"));
}

int64_t Attention::length() const { return length_of(parts); }

int64_t Attention::key_length() const {
  return keys_are_whole ? shardwright::length(key_parts.front()) : length_of(parts_of_keys());
}

int64_t ranks_per_node_of(const Mesh& mesh, const Topology& topology) {
  if (topology.ranks_per_node <= 0) return 0;
  std::vector<int64_t> nodes;  // by position
  for (const Rank rank : mesh.ranks()) nodes.push_back(to_int(rank) / topology.ranks_per_node);
  const auto next = std::find_if(nodes.begin(), nodes.end(), [&](int64_t node) { return node != nodes.front(); });
  const int64_t count = next - nodes.begin();
  if (mesh.size() % count != 0) return 0;
  std::set<int64_t> seen;
  for (int64_t begin = 0; begin < mesh.size(); begin += count) {
    if (!seen.insert(nodes[begin]).second) return 0;
    for (int64_t p = begin; p < begin + count; ++p) {
      if (nodes[p] != nodes[begin]) return 0;
    }
  }
  return count;
}

MeshPtr mesh_of_programs(const Attention& attention) {
  const Mesh& mesh = *attention.mesh;
  if (attention.method != AttentionMethod::kTwoLevel) return attention.mesh;
  const std::string& name = mesh.dim_names().front();
  std::vector<int64_t> ranks;
  for (const Rank rank : mesh.ranks()) ranks.push_back(to_int(rank));
  return std::make_shared<Mesh>(std::vector<std::string>{name, name + "_in_node"},
                                std::vector<int64_t>{mesh.size() / attention.ranks_per_node, attention.ranks_per_node},
                                ranks, mesh.topology());
}

void check(const Attention& attention) {
  const auto check_size = [](const char* name, int64_t size) {
    check_argument(size >= 0 && size < int64_t{1} << 40, name, "in [0, 2^40)", size);
  };
  check_user(attention.mesh->ndim() == 1, "mesh must have one dim, which cuts the sequence, got ", *attention.mesh);
  check_user(attention.dtype.kind() == DTypeKind::kFloat,
             "q must have dtype float32, bfloat16, float16 or float64, got ", attention.dtype.name());
  check_size("batch", attention.batch);
  check_size("heads", attention.heads);
  check_size("depth", attention.depth);
  check_user(attention.depth > 0, "q must have a last dim of at least 1, got ", attention.depth);
  check_size("value_depth", attention.value_depth);
  check_user(attention.value_depth > 0, "v must have a last dim of at least 1, got ", attention.value_depth);
  check_size("chunks", attention.chunks);
  check_user(attention.kv_heads > 0 && attention.heads % attention.kv_heads == 0,
             "k must have a number of heads that divides the heads of q (", attention.heads, "), got ",
             attention.kv_heads);
  check_argument(std::isfinite(attention.scale), "scale", "a finite number", attention.scale);
  check_user(
      attention.method != AttentionMethod::kTwoLevel || attention.supports_two_level(),
      "method must be one of auto, ring, gather, ulysses, serial, got 'two_level'. two_level requires a topology that "
      "divides the ",
      attention.mesh->size(),
      " ranks into several nodes of equal size with at least two consecutive ranks each (sw.calibrate, "
      "SHARDWRIGHT_TOPOLOGY)");
  check_user(attention.ranks_per_node >= 0 &&
                 (attention.ranks_per_node == 0 || attention.mesh->size() % attention.ranks_per_node == 0),
             "ranks_per_node must be 0 or divide the ", attention.mesh->size(), " ranks, got ",
             attention.ranks_per_node);
  check_parts(attention.parts, *attention.mesh, "layout");
  if (attention.keys_are_whole) {
    check_whole_keys(attention);
  } else if (!attention.key_parts.empty()) {
    check_parts(attention.key_parts, *attention.mesh, "kv_layout");
  }
  check_mask(attention.mask, attention.length(), attention.key_length());
  if (attention.mask_tensor) check_mask_tensor(attention);
}

Attention with_default_mask(Attention attention) {
  if (attention.mask_tensor) attention.mask_tensor = MaskTensor{};
  return attention;
}

bool exchanges_heads(AttentionMethod method) {
  return method == AttentionMethod::kUlysses || method == AttentionMethod::kTwoLevel;
}

std::string mask_text(const Attention& attention) {
  const AttentionMask& mask = attention.mask;
  std::vector<std::string> parts;
  if (attention.mask_tensor) parts.push_back("a tensor");
  if (mask.is_causal) parts.push_back("causal");
  if (mask.window) parts.push_back(concat("window ", *mask.window));
  if (!mask.documents.empty()) parts.push_back(concat(mask.documents.size(), " documents"));
  return parts.empty() ? "full" : join(parts);
}

}  // namespace shardwright
