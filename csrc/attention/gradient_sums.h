// Places at which the gradients of blocks are added up, and their order.
//
// The gradient of a block of queries is a sum over the blocks of keys that it meets, that of a block of keys (dk and
// dv) a sum over the blocks of queries that meet it. There are two orders:
//
//   by rank    Without Attention::chunks, or where every rank holds all keys. A rank adds up what it computes of a
//   block. The owner of keys adds what other
//              ranks send, by increasing distance.
//   by place   With chunks, where blocks can be the same for any number of ranks. Contributions of single products are
//              merged along a tree over the numbers of blocks (merge_tree.h), so sums depend on places alone. Of a
//              block of keys that another rank holds, a rank sends one sum for each largest node of the tree whose
//              blocks of queries are all its own: one if these are 2^n consecutive blocks of 2^n * m, else up to about
//              2 log2 of their number.
#pragma once

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "attention/merge_tree.h"
#include "attention/parts.h"

namespace shardwright {

inline bool sums_by_place(const Attention& attention) { return attention.chunks > 0 && !attention.keys_are_whole; }
inline HeadSharing sharing_in_backward(const Attention& attention) {
  return sums_by_place(attention) ? HeadSharing::kWholeHeadsOfKeys : HeadSharing::kAll;
}

// The gradients of a block somewhere in memory, from the first head that is computed on: dq, or dk and dv.
using BlockGradients = std::vector<Heads>;

// A rank's share of the gradients of the keys of another, as it lies in the message: for each block of keys that
// is needed the sums of some nodes, each dk followed by dv.
struct ReturnedSums {
  struct Sum {
    int keys = 0;
    TreeNode node;
    int first = 0;  // the first block of queries below the node
    BlockGradients at;
  };
  std::vector<Sum> sums;
  BufferId buffer = kMissingBuffer;  // missing if there is nothing to send
};

class GradientSums {
 public:
  // Of a rank's own rows or of keys that arrived, for this number of heads.
  GradientSums(AttentionWriter& writer, HeadKind kind, int64_t heads);

  // The whole gradient of the block is to be added to `total`, which begins as zeros.
  void set_total(int block, BlockGradients total);
  // This sum is to be added up where it will be sent from, which begins as zeros.
  void begin(const ReturnedSums::Sum& sum);

  // Returns where the product with block `other` is to add its contribution.
  BlockGradients place(int block, int other);
  // Says that this product was emitted.
  void added(int block, int other);
  // Adds a sum that another rank computed.
  void take(const ReturnedSums::Sum& sum);

 private:
  struct Block {
    explicit Block(const std::vector<bool>& contributes) : tree(contributes) {}

    std::optional<BlockGradients> total;
    std::map<int, BlockGradients> places;  // of products under way, by the other block
    MergeTree<BlockGradients> tree;
  };

  Block& of(int block);
  void add(int block, TreeNode node, const BlockGradients& sum);
  void accumulate(int block, const BlockGradients& from, const BlockGradients& to);

  AttentionWriter& writer_;
  HeadKind kind_;
  int64_t heads_;
  std::map<int, Block> blocks_;
};

// Makes a buffer for the sums of the owner's keys that rank `by` computes, for this number of heads.
ReturnedSums returned_sums(AttentionWriter& writer, int64_t owner, int64_t by, int64_t heads);

// The pairs of blocks that meet, in the order in which their products are computed: queries after queries; for sums by
// place along a Z-order curve, on which few sums of either side wait for others.
std::vector<std::pair<int, int>> pairs_in_order(const AttentionWriter& writer, const std::vector<int>& queries,
                                                const std::vector<int>& keys);

// The rows of a pair of blocks, from the first head of a share on.
struct BackwardRows {
  Heads q, k, v, out, dout;
  HeadRows lse;
  std::optional<PairMask> mask = std::nullopt;
};
// Emits the gradients of the product of two blocks.
void attend_backward(AttentionWriter& writer, const HeadShare& share, int queries, int keys, const BackwardRows& rows,
                     GradientSums& of_queries, GradientSums& of_keys);

}  // namespace shardwright
