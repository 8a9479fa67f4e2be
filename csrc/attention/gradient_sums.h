// The sums of the gradients of blocks: their memory and their order.
//
// The gradient of a block of queries (dq) is a sum over the blocks of keys that it overlaps. The gradients of a block
// of keys (dk and dv) are sums over the blocks of queries that overlap it. There are two orders:
//
//   by rank    Without Attention::chunks, or if every rank holds all keys. Each rank adds up its contributions to a
//              block. The owner of a block of keys adds the sums of the other ranks, by increasing distance.
//   by token   With chunks, where blocks can be the same for any number of ranks. The contributions of single products
//              are merged along a tree over the block numbers (merge_tree.h), so sums depend on tokens alone. For a
//              block of keys that another rank owns, a rank merges its contributions as far as the tree permits: up to
//              the largest nodes whose blocks of queries it all holds. It sends one sum for each of these nodes: one
//              sum if it holds 2^n consecutive blocks from a multiple of 2^n on, else up to about 2 log2(number of
//              blocks).
#pragma once

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "attention/merge_tree.h"
#include "attention/parts.h"

namespace shardwright {

// Returns true if sums are by token.
inline bool sums_by_token(const Attention& attention) { return attention.chunks > 0 && !attention.keys_are_whole; }
// Returns the sharing of heads in the backward of ulysses and two_level. For sums by token, one rank must compute the
// whole gradient of a head of keys.
inline HeadSharing sharing_in_backward(const Attention& attention) {
  return sums_by_token(attention) ? HeadSharing::kWholeHeadsOfKeys : HeadSharing::kAll;
}

// The memory of a block's gradients, beginning with the first computed head: {dq}, or {dk, dv}.
using BlockGradients = std::vector<Heads>;

// A message from one rank to the owner of keys: sums of the gradients of these keys. For each block of keys that the
// sender needs, the message has the sums of some tree nodes, each as dk followed by dv.
struct ReturnedSums {
  struct Sum {
    int keys = 0;       // number of the block of keys
    TreeNode node;      // unused for sums by rank
    int first = 0;      // the first block of queries that the node joins and that contributes; -1 for sums by rank
    BlockGradients at;  // memory of dk and dv in ReturnedSums::buffer
  };
  std::vector<Sum> sums;
  BufferId buffer = kMissingBuffer;  // missing if there is nothing to send
};

// Emits the instructions that add up the gradients of blocks of one kind: of this rank's queries, of its keys, or of
// keys received from another rank. For each product, call sum_for(), emit the product, and call finish_product().
class GradientSums {
 public:
  // Sums dq of blocks of queries for kQueries, dk and dv of blocks of keys for kKeys. `heads` is the number of heads of
  // each sum.
  GradientSums(AttentionWriter& writer, HeadKind kind, int64_t heads);

  // Sets the memory to which the complete gradient of the block is added. The memory must hold zeros at first. For sums
  // by rank, every block needs this call or set_memory() before sum_for() or add_received().
  void set_total(int block, BlockGradients total);
  // Sets the memory of a sum that will be sent: its place in the message, which must hold zeros at first.
  void set_memory(const ReturnedSums::Sum& sum);

  // Returns the memory to which the product of `block` and `other` must add its contribution. For sums by rank it is
  // the block's total; for sums by token, memory given to set_memory, or new memory that is set to zeros.
  BlockGradients sum_for(int block, int other);
  // Records that the product of `block` and `other` was emitted, and emits all merges that this makes possible. Needs
  // an earlier sum_for() of the same blocks.
  void finish_product(int block, int other);
  // Emits the addition of a sum that was received from another rank.
  void add_received(const ReturnedSums::Sum& sum);

 private:
  // The state of the gradient of one block.
  struct Block {
    explicit Block(const std::vector<bool>& contributes) : tree(contributes) {}

    std::optional<BlockGradients> total;
    std::map<int, BlockGradients> open_sums;  // by the other block: sums of products that are not finished
    MergeTree<BlockGradients> tree;
  };

  // Returns the state of a block, which is made on first use.
  Block& state_of(int block);
  // Adds the sum of a tree node to the block's tree, and emits all merges that this makes possible.
  void add(int block, TreeNode node, const BlockGradients& sum);
  // Emits to += from.
  void accumulate(int block, const BlockGradients& from, const BlockGradients& to);

  AttentionWriter& writer_;
  HeadKind kind_;
  int64_t heads_;
  std::map<int, Block> blocks_;
};

// Allocates a buffer for the sums of `heads` heads that rank `by` computes for the owner's keys, and returns the places
// of the sums in it. Sender and receiver get the same places. Returns no sums and a missing buffer if `by` needs none
// of the owner's keys. The sender must fill the buffer with zeros first.
ReturnedSums returned_sums(AttentionWriter& writer, int64_t owner, int64_t by, int64_t heads);

// Returns the pairs (queries, keys) of overlapping blocks, in the order in which their products are computed. For sums
// by rank, the order is by block of queries, then of keys. For sums by token, it is a Z-order curve, so that few sums
// wait to be merged. The curve for 4 causal blocks is 00 10 11 20 21 30 31 22 32 33, where 21 is block 2 of queries
// with block 1 of keys.
std::vector<std::pair<int, int>> pairs_in_order(const AttentionWriter& writer, const std::vector<int>& queries,
                                                const std::vector<int>& keys);

// The rows of a pair of blocks, beginning with the first head of a share.
struct BackwardRows {
  Heads q, k, v, out, dout;
  HeadRows lse;
  std::optional<PairMask> mask = std::nullopt;
};
// Emits the instructions that add the gradients of one block product to both sums: dq to the block of queries, dk and
// dv to the block of keys.
void attend_backward(AttentionWriter& writer, const HeadShare& share, int queries, int keys, const BackwardRows& rows,
                     GradientSums& of_queries, GradientSums& of_keys);

}  // namespace shardwright
