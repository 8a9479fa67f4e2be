// The blocks of the sequences of queries and of keys, and which of them meet.
//
// Blocks are as large as possible such that each lies within one run of one rank's part, within one of the chunks of
// the sequence if there are any, and within one document. Blocks of a sequence are numbered by ascending places.
//
// A block of queries meets a block of keys if some query sees some key. What is seen is a band (program/attend.h):
// everything, a triangle, or for sliding windows a stripe. Blocks that do not meet cost nothing, so a rank computes
// nothing that the mask leaves out but the rest of its stripes, and there is no padding anywhere.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention.h"
#include "program/attend.h"

namespace shardwright {

struct SequenceBlock {
  Interval places;
  int64_t owner = 0;  // position of the rank that holds it
  int64_t row = 0;    // its first row in the owner's local tensors
  int64_t document = 0;

  int64_t rows() const { return places.end - places.begin; }
};

// The blocks of one sequence.
class SequenceBlocks {
 public:
  SequenceBlocks(std::vector<SequenceBlock> blocks, int64_t num_ranks);
  // Each rank holds all blocks, one after the other.
  static SequenceBlocks whole(std::vector<SequenceBlock> blocks, int64_t num_ranks);
  // The same blocks, where the rows of `count` consecutive ranks lie one after the other as those of one rank.
  SequenceBlocks joined(int64_t count) const;

  const SequenceBlock& operator[](int index) const { return blocks_[index]; }
  int size() const { return static_cast<int>(blocks_.size()); }
  // The blocks of a rank, in the order of its local tensors.
  const std::vector<int>& of_rank(int64_t position) const { return by_rank_[position]; }

 private:
  std::vector<SequenceBlock> blocks_;
  std::vector<std::vector<int>> by_rank_;
};

class BlockProducts {
 public:
  explicit BlockProducts(const Attention& attention);
  // As SequenceBlocks::joined, of both sequences.
  BlockProducts joined(int64_t count) const;

  const SequenceBlocks& queries() const { return queries_; }
  const SequenceBlocks& keys() const { return keys_; }

  Band band(int queries, int keys) const;
  BlockShape shape(int queries, int keys) const;
  bool meet(int queries, int keys) const { return shape(queries, keys) != BlockShape::kSkip; }
  // By block: whether a block of queries meets it, or it meets a block of keys.
  std::vector<bool> met_by_queries(int queries) const;
  std::vector<bool> meeting_keys(int keys) const;
  // The blocks of keys that a block of queries meets, ascending.
  std::vector<int> keys_of(int queries) const;
  // The blocks of keys of one rank that queries of another meet and it does not hold itself, in the order of the
  // owner's local tensors.
  std::vector<int> keys_needed(int64_t owner, int64_t by) const;

 private:
  AttentionMask mask_;
  bool keys_are_whole_;
  SequenceBlocks queries_;
  SequenceBlocks keys_;
};

// The products of one rank, over all steps of a method that cuts the sequence.
struct BlockCounts {
  int64_t full = 0;
  int64_t triangles = 0;
  int64_t others = 0;
  int64_t pairs = 0;  // of queries and keys that see each other

  int64_t products() const { return full + triangles + others; }
};

BlockCounts count_blocks(const BlockProducts& products, int64_t position);

}  // namespace shardwright
