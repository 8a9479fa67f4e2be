// Attention over a sequence that is sharded over ranks: its specification.
//
// Queries, keys and values are [batch, heads, sequence, depth]. Values, and so results, may have a depth of their own.
// A *token* is an index into a sequence. For all heads, each rank holds the queries of some tokens, and the keys and
// values of some tokens. In self-attention these tokens are the same. In cross-attention keys have a sequence of their
// own, which every rank may hold in full. Sequences are cut into *blocks*: runs of rows that one rank holds. Attention
// is computed as products of blocks (block_products.h). Their results are merged in an order that depends on tokens
// alone, not on the number of ranks or on when data is received.
//
// Methods, on rank r of W:
//
//   ring       Step s receives the keys and values of rank r - s while the rank attends to those of step s - 1. At most
//              two of these parts exist at a time. The backward sends their gradients back in the next step, in
//              float32.
//   gather     One transfer receives everything that the rank needs, while it attends to its own keys.
//   serial     As gather, but nothing is computed during the transfer.
//   ulysses    Ranks exchange sequence for heads, attend to the whole sequence for their heads, and exchange back. The
//              results for one rank are sent while those for the next are computed.
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

// The form of a rank's mask tensor: [batch, heads, the rank's rows of queries, all keys by ascending tokens]. A dim of
// size 1 is broadcast. A bool tensor selects the keys that a query sees; any other is added to the scores. Forms may
// differ between ranks.
struct MaskTensor {
  DType dtype = DType::kBool;  // bool, float32 or that of queries
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t rows = 1;
  int64_t columns = 1;

  std::vector<int64_t> shape() const { return {batch, heads, rows, columns}; }
};

struct Attention {
  MeshPtr mesh;                   // of one mesh dim: the ranks that share the sequence
  DType dtype = DType::kFloat32;  // floating
  int64_t batch = 0;
  int64_t heads = 0;        // of queries
  int64_t kv_heads = 0;     // divides heads: consecutive heads of queries share one of keys and values
  int64_t depth = 0;        // elements of a head of queries and keys
  int64_t value_depth = 0;  // elements of a head of values and of results
  // The tokens of the queries that each rank holds, by position, in the order of its local tensors. Each token is on
  // one rank; parts may be empty.
  std::vector<IntervalList> parts;
  // The tokens of keys and values, in the same form. Empty: the tokens of queries.
  std::vector<IntervalList> key_parts = {};
  bool keys_are_whole = false;  // every rank holds all keys: each of `key_parts` is the full sequence
  AttentionMask mask = {};
  // The form of this rank's mask tensor, if it has one. `mask` must then let every query see every key.
  std::optional<MaskTensor> mask_tensor = std::nullopt;
  double scale = 1;  // factor of the scores
  // The number of chunks of equal length into which each sequence is cut, as torch.chunk cuts. If the parts of all
  // ranks begin and end at these cuts, the result is bitwise the same for any number of ranks. 0: blocks are the runs
  // that ranks hold.
  int64_t chunks = 0;
  AttentionMethod method = AttentionMethod::kRing;
  Lowering lowering = Lowering::kGloo;
  // The number of consecutive positions on a node, for two_level. It divides the number of ranks. 0: there are no
  // nodes.
  int64_t ranks_per_node = 0;

  // True if there are several nodes of several ranks each.
  bool has_levels() const { return 1 < ranks_per_node && ranks_per_node < mesh->size(); }
  const std::vector<IntervalList>& parts_of_keys() const { return key_parts.empty() ? parts : key_parts; }
  int64_t length() const;      // tokens in the sequence of queries
  int64_t key_length() const;  // tokens in the sequence of keys
  int64_t rows(int64_t position) const { return shardwright::length(parts[position]); }
  int64_t key_rows(int64_t position) const { return shardwright::length(parts_of_keys()[position]); }
  // The dtype of partial results and of sums of gradients: float64 for float64, else float32.
  DType sum_dtype() const { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }
};

// Returns the number of consecutive positions of a one-dim mesh that are on each node. Returns 0 if nodes hold
// different numbers of them, or positions that are not consecutive.
int64_t ranks_per_node_of(const Mesh& mesh, const Topology& topology);

// Returns the mesh whose groups the programs use: (nodes, ranks of a node) for two_level, else the attention's mesh.
MeshPtr mesh_of_programs(const Attention& attention);

// Returns the attention with a default mask tensor, because only the dtype and shape of a rank's mask may differ.
Attention with_default_mask(Attention attention);

// True if ranks exchange their part of the sequence for a share of the heads. Such methods support neither mask tensors
// nor keys that every rank holds.
bool exchanges_heads(AttentionMethod method);

// Throws UserError if the parts are not a partition of their sequence, or if another field is invalid.
void check(const Attention& attention);

// Returns a description of the keys that a query sees: "causal, window 128, 3 documents", "a tensor" or "full".
std::string mask_text(const Attention& attention);

}  // namespace shardwright
