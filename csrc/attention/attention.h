// Attention whose sequence is cut over ranks: what is asked for.
//
// Queries, keys and values are [batch, heads, sequence, depth], where values may have a depth of their own, which is
// that of results. Each rank holds some places of the sequence of queries and some of that of keys and values, for all
// heads. In self-attention these are the same; in cross-attention keys have a sequence of their own, which all ranks
// may hold whole. Sequences are cut into *blocks*, each of which one rank holds as one run of rows; attention is
// computed as products of blocks (block_products.h), whose results are merged in an order that follows from places
// alone: neither from the number of ranks nor from when something arrives.
//
// Methods, on rank r of W:
//
//   ring     In step s keys and values of rank r - s arrive, while those of step s - 1 are attended to. At most two of
//            these parts exist at a time. In the backward their gradients, in float32, travel back in the next step.
//   gather   Everything that the rank needs arrives in one transfer, while it attends to its own keys.
//   serial   The same, and nothing is computed meanwhile.
//   ulysses  Ranks exchange sequence for heads, attend to the whole sequence for their heads, and exchange back. The
//            results for one rank travel while those for the next are computed.
//   two_level  Within a node as ulysses, between nodes as a ring: ranks of a node exchange their parts for heads, keys
//   of
//            one node after the other arrive for these heads, and results are exchanged back.
//
// Ranks send one another only keys that some query of the receiver sees.
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

// A query at place i sees the key at place j if all of these hold.
struct AttentionMask {
  bool is_causal = false;                        // j <= i
  std::optional<int64_t> window = std::nullopt;  // |i - j| < window
  // The lengths of the documents that lie in the sequence one after the other: i and j are in the same one. Empty: one
  // document.
  std::vector<int64_t> documents = {};
};

// A rank's tensor that is added to scores, or of dtype bool says which keys a query sees: [batch, heads, the rank's
// rows of queries, all keys by ascending places], with 1 element in dims that it repeats along. Ranks may have such
// tensors of different forms.
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
  // By position: the places of queries that a rank holds, in the order of its local tensors. Each place once; parts may
  // be empty.
  std::vector<IntervalList> parts;
  // The same of keys and values. Empty: those of queries.
  std::vector<IntervalList> key_parts = {};
  bool keys_are_whole = false;  // every rank holds all keys, by ascending places; `key_parts` says so
  AttentionMask mask = {};
  // The form of one rank's tensor; `mask` leaves nothing out then.
  std::optional<MaskTensor> mask_tensor = std::nullopt;
  double scale = 1;  // of scores
  // Into how many parts of equal length (as torch.chunk cuts) each whole sequence is cut. Where parts of ranks begin
  // and end at these cuts, the result is bitwise the same for any number of ranks. 0: blocks are the runs that ranks
  // hold.
  int64_t chunks = 0;
  AttentionMethod method = AttentionMethod::kRing;
  Lowering lowering = Lowering::kGloo;
  // For two_level: that many consecutive positions are a node. They divide the ranks. 0: there are no nodes.
  int64_t ranks_per_node = 0;

  // Returns whether there are several nodes of several ranks each.
  bool has_levels() const { return 1 < ranks_per_node && ranks_per_node < mesh->size(); }
  const std::vector<IntervalList>& parts_of_keys() const { return key_parts.empty() ? parts : key_parts; }
  int64_t length() const;      // of the sequence of queries
  int64_t key_length() const;  // of the sequence of keys
  int64_t rows(int64_t position) const { return shardwright::length(parts[position]); }
  int64_t key_rows(int64_t position) const { return shardwright::length(parts_of_keys()[position]); }
  // The dtype of partial results and of sums of gradients: float64 for float64, else float32.
  DType sum_dtype() const { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }
};

// Returns how many consecutive positions of a mesh of one dim each node holds, or 0 if it is not the same number of
// neighbours everywhere.
int64_t ranks_per_node_of(const Mesh& mesh, const Topology& topology);

// The mesh whose groups the programs of a method have: that of the attention, or nodes by ranks of a node.
MeshPtr mesh_of_programs(const Attention& attention);

// The same attention without what may differ between ranks: the form of the mask tensor.
Attention as_on_all_ranks(Attention attention);

// Returns whether ranks exchange their part of the sequence for a share of the heads. Such methods take neither mask
// tensors nor keys that every rank holds.
bool exchanges_heads(AttentionMethod method);

// Throws UserError if the parts are not a partition of their sequence, or if anything else does not fit.
void check(const Attention& attention);

// The keys that a query sees: "causal, window 128, 3 documents", "a tensor" or "full".
std::string mask_text(const Attention& attention);

}  // namespace shardwright
