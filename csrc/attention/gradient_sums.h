// The sums of the gradients of blocks: their memory and their order.
//
// The gradient of a block of queries (dq) is a sum over the blocks of keys that it overlaps. The gradients of a block
// of keys (dk and dv) are sums over the blocks of queries that overlap it. There are two orders:
//
//   by rank    Without Attention::chunks, or if every rank holds all keys. Each rank adds up its contributions to a
//              block. The owner of the keys adds the sums that it receives, by increasing distance.
//   by token   With chunks, where blocks can be the same for any number of ranks. Contributions of single products are
//              merged along a tree over the block numbers (merge_tree.h), so sums depend on tokens alone. For a block
//              of keys that another rank holds, a rank sends one sum for each largest node of the tree whose blocks of
//              queries it holds all. That is one sum for 2^n consecutive blocks that begin at a multiple of 2^n, else
//              up to about 2 log2 of their number.
#pragma once

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "attention/merge_tree.h"
#include "attention/parts.h"

namespace shardwright {

// True if sums are by token.
inline bool sums_by_token(const Attention& attention) { return attention.chunks > 0 && !attention.keys_are_whole; }
inline HeadSharing sharing_in_backward(const Attention& attention) {
  return sums_by_token(attention) ? HeadSharing::kWholeHeadsOfKeys : HeadSharing::kAll;
}

// The memory of a block's gradients, beginning with the first computed head: {dq}, or {dk, dv}.
using BlockGradients = std::vector<Heads>;

// A message: one rank's sums of the gradients of another rank's keys. For each needed block of keys it holds the sums
// of some tree nodes, each as dk followed by dv.
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

// Adds up the gradients of blocks of one kind: of a rank's own rows, or of received keys.
class GradientSums {
 public:
  // `heads` is the number of heads of each sum.
  GradientSums(AttentionWriter& writer, HeadKind kind, int64_t heads);

  // Sets the memory to which the complete gradient of the block is added. It must begin as zeros.
  void set_total(int block, BlockGradients total);
  // Sets the memory of a sum within its message. It must begin as zeros.
  void begin(const ReturnedSums::Sum& sum);

  // Returns the memory to which the product of `block` and `other` must add its contribution: the total for sums by
  // rank, else new memory with zeros, or that of begin().
  BlockGradients sum_for(int block, int other);
  // Must be called once that product was emitted.
  void added(int block, int other);
  // Adds a sum that was received from another rank.
  void take(const ReturnedSums::Sum& sum);

 private:
  struct Block {
    explicit Block(const std::vector<bool>& contributes) : tree(contributes) {}

    std::optional<BlockGradients> total;
    std::map<int, BlockGradients> open_sums;  // of products whose added() is still missing, by the other block
    MergeTree<BlockGradients> tree;
  };

  // Returns the state of a block, which is made on first use.
  Block& of(int block);
  // Adds the sum of a tree node, and emits all merges that have become possible.
  void add(int block, TreeNode node, const BlockGradients& sum);
  // Emits to += from.
  void accumulate(int block, const BlockGradients& from, const BlockGradients& to);

  AttentionWriter& writer_;
  HeadKind kind_;
  int64_t heads_;
  std::map<int, Block> blocks_;
};

// Allocates a buffer for the sums that rank `by` computes for the owner's keys, of `heads` heads.
ReturnedSums returned_sums(AttentionWriter& writer, int64_t owner, int64_t by, int64_t heads);

// Returns the pairs (queries, keys) of blocks that overlap, in the order in which their products are computed: for sums
// by rank, by block of queries; for sums by token, along a Z-order curve, so that few sums wait to be merged. The curve
// for 4 causal blocks is 00 10 11 20 21 30 31 22 32 33, where 21 is block 2 of queries with block 1 of keys.
std::vector<std::pair<int, int>> pairs_in_order(const AttentionWriter& writer, const std::vector<int>& queries,
                                                const std::vector<int>& keys);

// The rows of a pair of blocks, beginning with the first head of a share.
struct BackwardRows {
  Heads q, k, v, out, dout;
  HeadRows lse;
  std::optional<PairMask> mask = std::nullopt;
};
// Emits the instructions that add the gradients of one block product to both sums.
void attend_backward(AttentionWriter& writer, const HeadShare& share, int queries, int keys, const BackwardRows& rows,
                     GradientSums& of_queries, GradientSums& of_keys);

}  // namespace shardwright
