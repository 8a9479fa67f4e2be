// The partial results of a rank's blocks of queries, and their merging.
//
// The results for a block of queries are merged along the tree over the blocks of keys that it overlaps (merge_tree.h).
#pragma once

#include <map>
#include <optional>

#include "attention/merge_tree.h"
#include "attention/parts.h"

namespace shardwright {

// The partial results of one rank. A partial result is in one buffer: the output of all rows, then their lse.
class PartialResults {
 public:
  // `share` has the heads that this rank computes.
  PartialResults(AttentionWriter& writer, HeadShare share);

  // Emits the product of the blocks numbered `queries` and `keys`, which must overlap, and all merges that this product
  // makes possible. `q`, `k` and `v` are the rows of the blocks, beginning with the first head of the share; `mask` is
  // the mask of the pair. Returns true if the result of the block of queries is now complete.
  bool attend(int queries, const Heads& q, int keys, const Heads& k, const Heads& v,
              const std::optional<PairMask>& mask = std::nullopt);
  // Emits the result of a block of queries that see no keys: zeros, and an lse of minus infinity.
  // `q` has the rows of the block, as in attend().
  void set_empty_result(int queries, const Heads& q);

  // Emits copies of the complete result of a block of queries to `out`, rounded to Attention::dtype, and to `lse`,
  // beginning at row `row` of head `first_head`, and forgets the result. Throws InvariantError if the result is
  // incomplete.
  void store(int queries, int64_t row, const HeadsTensor& out, const HeadsTensor& lse, int64_t first_head);

 private:
  // Returns the tree of a block of queries, which is made on first use.
  MergeTree<BufferId>& tree(int queries);
  // Return parts of the partial result in a buffer: the output, the lse, and both from this head on.
  HeadsTensor out_in(BufferId buffer, int queries) const;
  HeadsTensor lse_in(BufferId buffer, int queries) const;
  Partial partial(BufferId buffer, int queries, int64_t head) const;
  // Returns the sizes of a Merge for a block of queries. An Attend also needs `columns`.
  AttendSizes sizes(int queries) const;
  // Allocates a buffer for a partial result.
  BufferId new_partial(int queries);

  AttentionWriter& writer_;
  HeadShare share_;
  std::map<int, MergeTree<BufferId>> trees_;  // by block of queries, while incomplete
  std::map<int, BufferId> complete_;          // by block of queries, until store()
};

}  // namespace shardwright
