// How a batch is carried out: who sends what to whom, in which round, and with how much memory.
//
//   kinds      Items with equal layouts and equal maps are of one kind, and share one Crossing: a state dict of 20,000
//              tensors has some dozens of kinds. Each element that a rank needs and does not hold is sent to it once;
//              what it holds is copied locally. The holders of a part share the sending to the element. Where their
//              shares would be below kLeastShareBytes, one holder sends a whole message instead, and the items of the
//              kind take turns in who begins.
//   rounds     schedule.h.
//   programs   batch_program.h: what one rank does, in proportion to its own parcels.
//
// Memory. A run takes buckets() buffers of bucket_bytes() each, at its beginning, and nothing else besides the results:
// what is sent is packed from tensors of any strides, and cast, directly into a bucket, and unpacked directly into its
// place. Memory that the process group's backend takes for itself is not counted.
//
// Pending reductions are not part of a batch: they must be reduced before. Contributions that travelled straight to all
// replicas of a destination would take k * n transfers per element, where reducing first takes k + n - 1, which is the
// bound, and the reductions of plans are summed in a fixed order already.
//
// Everything here follows from the batch alone and is the same on all ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "batch/batch.h"
#include "batch/schedule.h"
#include "crossing/crossing.h"

namespace shardwright {

class BatchPlan {
 public:
  static constexpr int64_t kLeastShareBytes = 16 << 10;
  static constexpr int64_t kMaxTurns = 16;

  // Throws UserError as Batch::check and Scheduler::add do.
  explicit BatchPlan(Batch batch);

  const Batch& batch() const { return batch_; }
  const std::vector<Rank>& ranks() const { return ranks_; }
  int num_rounds() const { return num_rounds_; }
  // No larger and no more than the batch asks for; the largest round of any rank fits.
  int64_t bucket_bytes() const { return bucket_bytes_; }
  int64_t buckets() const { return buckets_; }

  // The dtype in which an item travels, and in which it arrives.
  DType wire_dtype(int item) const { return batch_.destinations[batch_.items[item].destination].dtype(); }

  // Items with equal layouts, maps and turns.
  struct Kind {
    int item = 0;                 // one of them
    Crossing crossing;            // its dims are the map's axes
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
  Kind make_kind(int item, const Crossing& crossing) const;
  void schedule();

  Batch batch_;
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
