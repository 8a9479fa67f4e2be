// The plan of a batch: its messages, their rounds, and its memory.
//
//   reductions Sources with pending reductions are first reduced, each by a plan of its own, to a layout that cuts the
//              tensor further (reductions.h). The following is about the reduced sources.
//   kinds      Items with equal layouts, maps and first senders are of one kind and share one Exchange, which has the
//              messages between ranks (exchange/exchange.h). A state dict of 20,000 tensors has some dozens of kinds.
//              Each element that a rank needs and does not hold is sent to it once; elements that it holds are copied
//              locally. The candidate senders of a part, the ranks that hold it, share its elements evenly. If a share
//              would be smaller than ItemFamily::kLeastShareBytes, one candidate sends a whole message instead, and the
//              items alternate between first senders (item_family.h): each item gets the first sender with the fewest
//              bytes so far; ties go to the first one from Batch::first_sender_group on. Sources on one mesh that are
//              replicated over the same mesh dims are balanced together, over all kinds.
//   rounds     schedule.h assigns the items to rounds.
//   programs   compile_batch.h makes the instructions of one rank, proportional to its own messages.
//
// Memory. A run takes buckets() buffers of at most bucket_bytes() each, besides the results and reduced sources.
// Tensors of any strides are packed directly into a bucket and unpacked directly from it, and these copies also cast.
// Memory that the process group's backend allocates is not counted.
//
// The plan depends on the batch alone and is the same on all ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "batch/batch.h"
#include "batch/item_family.h"
#include "batch/reductions.h"
#include "batch/schedule.h"

namespace shardwright {

// Immutable.
class BatchPlan {
 public:
  // Plans the batch. Throws UserError as Batch::check(), the constructor of ItemFamily and Scheduler::add() do.
  explicit BatchPlan(Batch batch);

  // The batch, with reduced layouts in place of the layouts of sources with pending reductions.
  const Batch& batch() const { return batch_; }
  // Reductions to run first, in the order of sources.
  const std::vector<BatchReduction>& reductions() const { return reductions_; }
  // The ranks of all meshes, ascending. ItemLoad::rank is an index into this list.
  const std::vector<Rank>& ranks() const { return ranks_; }
  int num_rounds() const { return num_rounds_; }  // 0 if nothing is sent
  // Size and number of buckets: at most the batch's settings. The largest round of any rank fits into a bucket. Both
  // are 0 if nothing is sent.
  int64_t bucket_bytes() const { return bucket_bytes_; }
  int64_t buckets() const { return buckets_; }

  // Returns the dtype in which the elements of an item are sent.
  DType wire_dtype(int item) const {
    return shardwright::wire_dtype(batch_.sources[batch_.items[item].source],
                                   batch_.destinations[batch_.items[item].destination]);
  }

  // Items with equal layouts, maps and first senders.
  struct Kind {
    int item = 0;                 // index of one such item
    ExchangePtr exchange;         // the messages of one item
    std::vector<ItemLoad> loads;  // one for each rank that sends or receives; largest first
    int64_t num_items = 0;        // number of items of this kind
  };
  const std::vector<Kind>& kinds() const { return kinds_; }
  // Returns the index of an item's kind in kinds().
  int kind_of(int item) const { return kind_of_item_[item]; }
  // The indices of the items in the order in which they are assigned to rounds and packed into messages.
  const std::vector<int>& order() const { return order_; }
  // Returns the pieces of an item (schedule.h); none if all of its elements stay on their ranks.
  const std::vector<ItemPiece>& pieces(int item) const { return pieces_[item]; }

 private:
  // Sets kinds_ and kind_of_item_.
  void find_kinds();
  // Returns a new kind of which this item is the first, with the loads of its exchange. num_items is still 0.
  Kind make_kind(int item, ExchangePtr exchange) const;
  // Sets order_, pieces_, num_rounds_, bucket_bytes_ and buckets_.
  void schedule();

  Batch batch_;
  std::vector<BatchReduction> reductions_;
  std::vector<Rank> ranks_;
  std::vector<Kind> kinds_;
  std::vector<int> kind_of_item_;  // by item: index into kinds_
  std::vector<int> order_;
  std::vector<std::vector<ItemPiece>> pieces_;  // by item
  int num_rounds_ = 0;
  int64_t bucket_bytes_ = 0;
  int64_t buckets_ = 0;
};

}  // namespace shardwright
