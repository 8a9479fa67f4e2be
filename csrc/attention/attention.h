// Attention over a sequence that is sharded over ranks: its specification.
//
// Queries, keys and values are [batch, heads, sequence, depth]. Values and results may have another depth than queries
// and keys. A *token* is an index into a sequence. For all heads, each rank holds the queries of some tokens, and the
// keys and values of some tokens. In self-attention these tokens are the same. In cross-attention keys have a sequence
// of their own, which every rank may hold in full. Sequences are cut into *blocks*: runs of rows that one rank holds.
// Attention is computed as products of a block of queries and a block of keys (block_products.h). The partial results
// of these products are merged in an order that depends on tokens alone, not on the number of ranks or on when data is
// received.
//
// Methods, on rank r of W:
//
//   ring       Step s receives the keys and values of rank r - s while the rank attends to those that step s - 1
//              received (step 1: to its own). A rank holds at most two received parts at a time. The backward sends the
//              gradients of a received part back to its owner in the next step, in Attention::sum_dtype().
//   gather     One transfer receives everything that the rank needs, while it attends to its own keys.
//   serial     As gather, but nothing is computed during the transfer.
//   ulysses    Ranks exchange sequence for heads, attend to the whole sequence for their heads, and exchange back. The
//              results for one rank are sent while the results for the next rank are computed.
//   two_level  Ulysses within a node, a ring between nodes: the ranks of a node exchange their parts for heads, receive
//              the keys of one node after the other for these heads, and exchange the results back.
//
// A rank sends another rank only keys that some query of the receiver sees.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cost/lowering.h"
#include "cost/topology.h"
#include "layout/dtype.h"
#include "layout/mesh.h"
#include "layout/region.h"

namespace shardwright {

enum class AttentionMethod : uint8_t { kSerial, kRing, kGather, kUlysses, kTwoLevel };

const char* method_name(AttentionMethod method);  // "serial", "ring", "gather", "ulysses" or "two_level"
AttentionMethod parse_attention_method(const std::string& name);  // throws UserError

// A query at token i sees the key at token j if all of these hold.
struct AttentionMask {
  bool is_causal = false;                        // j <= i
  std::optional<int64_t> window = std::nullopt;  // |i - j| < window
  // The lengths of consecutive documents in the sequence: i and j are in the same document. Empty: one document.
  std::vector<int64_t> documents = {};
};

// The dtype and shape of a rank's mask tensor: [batch, heads, the rank's rows of queries, all keys by ascending
// tokens]. A dim of size 1 is broadcast. A bool tensor selects the keys that a query sees; a tensor of another dtype is
// added to the scores. Dtype and shape may differ between ranks.
struct MaskTensor {
  DType dtype = DType::kBool;  // bool, float32 or the dtype of queries
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t rows = 1;
  int64_t columns = 1;

  std::vector<int64_t> shape() const { return {batch, heads, rows, columns}; }
};

// One attention over a sharded sequence, with the method that computes it.
struct Attention {
  MeshPtr mesh;                   // of one mesh dim: the ranks that share the sequence
  DType dtype = DType::kFloat32;  // of queries, keys, values and results; a floating-point dtype
  int64_t batch = 0;
  int64_t heads = 0;        // number of heads of queries
  int64_t kv_heads = 0;     // number of heads of keys and values; heads / kv_heads consecutive query heads share one
  int64_t depth = 0;        // elements of a head of queries and keys
  int64_t value_depth = 0;  // elements of a head of values and of results
  // By position: the tokens of the queries that the rank holds, in the order of its local tensors. Each token is on one
  // rank; parts may be empty.
  std::vector<IntervalList> parts;
  // By position: the tokens of the keys and values that the rank holds. Empty in self-attention: keys have `parts`.
  std::vector<IntervalList> key_parts = {};
  bool keys_are_whole = false;  // every rank holds all keys: each of `key_parts` is the full sequence
  AttentionMask mask = {};
  // This rank's mask tensor, if there is one. `mask` must then let every query see every key.
  std::optional<MaskTensor> mask_tensor = std::nullopt;
  double scale = 1;  // factor of the scores
  // The number of chunks of equal length into which each sequence is cut, as torch.chunk cuts. Blocks end at these
  // cuts. If the parts of all ranks also begin and end at these cuts, the result is bitwise the same for any number of
  // ranks. 0: chunks do not cut the sequences.
  int64_t chunks = 0;
  AttentionMethod method = AttentionMethod::kRing;
  Lowering lowering = Lowering::kGloo;
  // The number of consecutive positions on each node, for two_level. It divides the number of ranks. 0: nodes are
  // unknown, or of unequal sizes.
  int64_t ranks_per_node = 0;

  // Returns true if there are several nodes with several ranks each.
  bool supports_two_level() const { return 1 < ranks_per_node && ranks_per_node < mesh->size(); }
  const std::vector<IntervalList>& parts_of_keys() const { return key_parts.empty() ? parts : key_parts; }
  int64_t length() const;      // number of tokens in the sequence of queries
  int64_t key_length() const;  // number of tokens in the sequence of keys; keys_are_whole needs non-empty key_parts
  // Return the number of rows in a rank's local queries, and in its local keys and values.
  int64_t rows(int64_t position) const { return shardwright::length(parts[position]); }
  int64_t key_rows(int64_t position) const { return shardwright::length(parts_of_keys()[position]); }
  // The dtype of partial results and of sums of gradients: float64 for float64, else float32.
  DType sum_dtype() const { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }
};

// Returns the number of positions of a one-dim mesh that are on each node. Returns 0 if the topology has no nodes, if
// nodes hold different numbers of positions, or if the positions on a node are not consecutive.
int64_t ranks_per_node_of(const Mesh& mesh, const Topology& topology);

// Returns the mesh whose groups the programs use: [number of nodes, ranks_per_node] for two_level, which needs
// supports_two_level(), else the attention's mesh.
MeshPtr mesh_of_programs(const Attention& attention);

// Returns the attention with MaskTensor{} in place of its mask tensor, if it has one. Ranks compare the results: the
// dtype and shape of mask tensors are the only fields that may differ between ranks.
Attention with_default_mask(Attention attention);

// Returns true for ulysses and two_level, in which ranks exchange their part of the sequence for a share of the heads.
// These methods support neither mask tensors nor keys that every rank holds.
bool exchanges_heads(AttentionMethod method);

// Throws UserError that names the invalid argument: if the parts are not a partition of their sequence, or if another
// field is invalid.
void check(const Attention& attention);

// Returns a description of the keys that a query sees: "causal, window 128, 3 documents", "a tensor" or "full".
std::string mask_text(const Attention& attention);

}  // namespace shardwright
