// The partial results of a rank's blocks of queries, and their merging.
//
// The results for a block of queries are merged along a binary tree over the numbers of all blocks of keys: those of
// blocks 2 i and 2 i + 1, then those of four consecutive blocks, and so on. Blocks that do not meet the queries are
// left out. So the tree follows from the blocks and the mask alone, and a merge takes place as soon as both of its
// sides are there, whatever the order in which keys arrive. Where keys arrive in order, at most about log2 of the
// number of blocks wait to be merged.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "attention/parts.h"

namespace shardwright {

class PartialResults {
 public:
  // For some blocks of queries; `share` says which heads this rank computes.
  PartialResults(AttentionWriter& writer, HeadShare share);

  // Emits the product of two blocks that meet, and all merges that have become possible. `q`, `k` and `v` are the rows
  // of the blocks, from the first head of the share on. Returns whether the result of the queries is now complete.
  bool attend(int queries, const Heads& q, int keys, const Heads& k, const Heads& v);
  // For queries that see nothing: makes their result zeros.
  void see_nothing(int queries, const Heads& q);

  // Writes the complete result of a block of queries to rows of `out` and `lse`, which begin with the first head of the
  // share if they hold these heads alone, and forgets it.
  void store(int queries, int64_t row, const HeadsTensor& out, const HeadsTensor& lse, int64_t first_head);

 private:
  using Node = std::pair<int, int>;  // level of the tree, index on it
  struct Queries {
    std::vector<int> before;           // the number of blocks of keys before each that these queries meet
    std::map<Node, BufferId> waiting;  // partial results that wait for their sibling
    BufferId complete = kMissingBuffer;
  };

  Queries& of(int queries);
  // The number of blocks below a node that the queries meet.
  static int met(const Queries& queries, Node node);
  // A partial result lies in one buffer: the output of all rows, then lse.
  HeadsTensor out_in(BufferId buffer, int queries) const;
  HeadsTensor lse_in(BufferId buffer, int queries) const;
  Partial partial(BufferId buffer, int queries, int64_t head) const;
  AttendSizes sizes(int queries) const;
  BufferId new_partial(int queries);

  AttentionWriter& writer_;
  HeadShare share_;
  std::map<int, Queries> queries_;
};

}  // namespace shardwright
