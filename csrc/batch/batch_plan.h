// The plan of a batch: who sends what to whom, in which round, and with how much memory.
//
//   reductions Sources with pending reductions are first reduced, each by a plan of its own, to a layout that cuts the
//              tensor further (reductions.h). All that follows is about the reduced sources.
//   kinds      Items with equal layouts and equal maps are of one kind, and share one Exchange: a state dict of 20,000
//              tensors has some dozens of kinds. Each element that a rank needs and does not hold is sent to it once;
//              what it holds is copied locally. The holders of a part share the sending to the element. Where their
//              shares would be below ItemFamily::kLeastShareBytes, one holder sends a whole message instead, and items
//              of all kinds from replicas of one shape take turns in who begins: each takes the turn that has had
//              fewest bytes, beginning with Batch::first_turn.
//   rounds     schedule.h.
//   programs   compile_batch.h: the instructions of one rank, in proportion to its own messages.
//
// Memory. A run takes buckets() buffers of at most bucket_bytes() each, and nothing else besides the results and
// reduced sources: what is sent is packed from tensors of any strides directly into a bucket, and unpacked directly
// into its place; casts are part of one of the two. Memory that the process group's backend takes for itself is not
// counted.
//
// Everything here follows from the batch alone and is the same on all ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "batch/batch.h"
#include "batch/item_family.h"
#include "batch/reductions.h"
#include "batch/schedule.h"

namespace shardwright {

class BatchPlan {
 public:
  // Throws UserError as Batch::check and Scheduler::add do.
  explicit BatchPlan(Batch batch);

  // With reduced sources in place of those with pending reductions.
  const Batch& batch() const { return batch_; }
  // The reductions that come before, in the order of sources.
  const std::vector<BatchReduction>& reductions() const { return reductions_; }
  const std::vector<Rank>& ranks() const { return ranks_; }
  int num_rounds() const { return num_rounds_; }
  // No larger and no more than the batch asks for; the largest round of any rank fits.
  int64_t bucket_bytes() const { return bucket_bytes_; }
  int64_t buckets() const { return buckets_; }

  DType wire_dtype(int item) const {
    return shardwright::wire_dtype(batch_.sources[batch_.items[item].source],
                                   batch_.destinations[batch_.items[item].destination]);
  }

  // Items with equal layouts, maps and turns.
  struct Kind {
    int item = 0;  // one of them
    ExchangePtr exchange;
    std::vector<ItemLoad> loads;  // the largest first
    int64_t num_items = 0;
  };
  const std::vector<Kind>& kinds() const { return kinds_; }
  int kind_of(int item) const { return kind_of_item_[item]; }
  // The items in the order in which they travel, and the pieces of each.
  const std::vector<int>& order() const { return order_; }
  const std::vector<ItemPiece>& pieces(int item) const { return pieces_[item]; }

 private:
  void find_kinds();
  Kind make_kind(int item, ExchangePtr exchange) const;
  void schedule();

  Batch batch_;
  std::vector<BatchReduction> reductions_;
  std::vector<Rank> ranks_;
  std::vector<Kind> kinds_;
  std::vector<int> kind_of_item_;
  std::vector<int> order_;
  std::vector<std::vector<ItemPiece>> pieces_;  // by item
  int num_rounds_ = 0;
  int64_t bucket_bytes_ = 0;
  int64_t buckets_ = 0;
};

}  // namespace shardwright
