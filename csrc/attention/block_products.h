// The blocks of the sequences of queries and of keys, and the pairs of blocks that are multiplied.
//
// Blocks are as large as possible, but each block is within one run of one rank's part, one chunk of the sequence (if
// there are chunks) and one document. Blocks of a sequence are numbered by ascending tokens.
//
// A block of queries *overlaps* a block of keys if some query of the one sees some key of the other. The visible pairs
// of (query, key) are a band (program/attend.h): all pairs, a triangle, or for sliding windows a stripe. Pairs of
// blocks that do not overlap cost nothing. There is no padding, and a rank computes masked scores only next to stripes.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention.h"
#include "program/attend.h"

namespace shardwright {

// One block: consecutive tokens that are consecutive rows of their owner's local tensors.
struct SequenceBlock {
  Interval tokens;
  int64_t owner = 0;     // position of the rank that holds the block
  int64_t row = 0;       // first row in the owner's local tensors
  int64_t document = 0;  // index of the document that contains the block

  int64_t rows() const { return tokens.end - tokens.begin; }
};

// The blocks of one sequence.
class SequenceBlocks {
 public:
  // `blocks` must be sorted by tokens, with owners in [0, num_ranks). The number of a block is its index.
  SequenceBlocks(std::vector<SequenceBlock> blocks, int64_t num_ranks);
  // Makes the blocks of a sequence that every rank holds in full: of_rank() returns all blocks for every rank. The
  // owner of each block must be 0.
  static SequenceBlocks whole(std::vector<SequenceBlock> blocks, int64_t num_ranks);
  // Returns the same blocks on fewer ranks: each new rank has the rows of `count` consecutive ranks, one after the
  // other. With count = 2, rank 1 becomes rank 0, and its first row follows the last row of the old rank 0. `count`
  // must divide the number of ranks. Not for blocks made by whole().
  SequenceBlocks joined(int64_t count) const;

  const SequenceBlock& operator[](int index) const { return blocks_[index]; }
  int size() const { return static_cast<int>(blocks_.size()); }
  // Returns the numbers of the blocks of a rank, in the order of its local tensors.
  const std::vector<int>& of_rank(int64_t position) const { return by_rank_[position]; }

 private:
  std::vector<SequenceBlock> blocks_;
  std::vector<std::vector<int>> by_rank_;
};

// The blocks of queries and of keys, and the pairs of blocks that are multiplied. The parameters `queries` and `keys`
// are the number of a block of queries and the number of a block of keys.
class BlockProducts {
 public:
  explicit BlockProducts(const Attention& attention);  // check(attention) must pass
  // Joins the ranks of both sequences (SequenceBlocks::joined).
  BlockProducts joined(int64_t count) const;

  const SequenceBlocks& queries() const { return queries_; }
  const SequenceBlocks& keys() const { return keys_; }

  // Returns the visible pairs of two blocks, relative to their first tokens. Blocks of different documents have an
  // empty band.
  Band band(int queries, int keys) const;
  // Returns the shape of the visible pairs: kSkip if there are none.
  BlockShape shape(int queries, int keys) const;
  bool overlap(int queries, int keys) const { return shape(queries, keys) != BlockShape::kSkip; }
  // Returns one entry per block of keys: true if this block of queries overlaps it.
  std::vector<bool> key_overlaps(int queries) const;
  // Returns one entry per block of queries: true if it overlaps this block of keys.
  std::vector<bool> query_overlaps(int keys) const;
  // Returns the numbers of the blocks of keys that a block of queries overlaps, ascending.
  std::vector<int> keys_of(int queries) const;
  // Returns the numbers of the blocks of the owner's keys that some block of queries of rank `by` overlaps, in the
  // order of the owner's local tensors. Returns an empty list if every rank holds all keys.
  std::vector<int> keys_needed(int64_t owner, int64_t by) const;

 private:
  AttentionMask mask_;
  bool keys_are_whole_;
  SequenceBlocks queries_;
  SequenceBlocks keys_;
};

// The number of block products of one rank, by shape, over all steps of a method that cuts the sequence.
struct BlockCounts {
  int64_t full = 0;
  int64_t triangles = 0;
  int64_t others = 0;  // stripes, and parts of triangles
  int64_t pairs = 0;   // visible (query, key) pairs of tokens, for one head of one batch item

  int64_t products() const { return full + triangles + others; }
};

// Returns the counts of the rank at `position`.
BlockCounts count_blocks(const BlockProducts& products, int64_t position);

}  // namespace shardwright
