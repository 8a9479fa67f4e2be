// Makes the exchanges of the items of a batch.
//
// An item whose layouts are partitions and flatten the same dims has a GridExchange of boxes; all other items have an
// IndexedExchange. Items of one family have equal layouts and maps, and share exchanges.
//
// A part of a replicated source is on several ranks, its *candidate senders*. The *first sender* is the replica that
// sends the first messages of a part (exchange/grid_exchange.h). If messages are too small to be shared by candidate
// senders, the items of a family alternate between up to kMaxSenderGroups first senders, evenly spaced over the
// replicas. A *sender group* is the index of one of these first senders. Example: with 32 replicas, the sender groups 0
// to 15 have the first senders 0, 2, ..., 30.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "exchange/exchange.h"
#include "exchange/index_map.h"
#include "layout/layout.h"

namespace shardwright {

// Returns the dtype in which elements are sent: the smaller of the two dtypes, or the destination's if both have one
// size. Elements in the source's dtype are cast after they are received, others before they are sent.
inline DType wire_dtype(const Layout& src, const Layout& dst) {
  return src.dtype().size_bytes() < dst.dtype().size_bytes() ? src.dtype() : dst.dtype();
}

using ExchangePtr = std::shared_ptr<const Exchange>;

// The exchanges of all items with two given layouts and a given map: one exchange for each sender group.
class ItemFamily {
 public:
  // Candidate senders share a message evenly if a share has at least this many bytes. Otherwise one candidate sends the
  // whole message.
  static constexpr int64_t kLeastShareBytes = 16 << 10;
  static constexpr int64_t kMaxSenderGroups = 16;  // maximum number of first senders that alternate

  // The layouts must outlive the family and have no pending reductions. Throws UserError if a part of a flattened
  // layout has too many runs of consecutive elements (axis_grids in exchange/axes.h).
  ItemFamily(const Layout& src, const Layout& dst, const IndexMap& map);

  // Returns the number of sender groups; 1 if first senders do not alternate.
  int64_t sender_groups() const { return sender_groups_; }
  // Returns the exchange of the items with this sender group, which must be in [0, sender_groups()). With several
  // groups, each call makes a new exchange.
  ExchangePtr exchange(int64_t sender_group) const;

 private:
  // Returns the only exchange of a family with a GridExchange. If first senders alternate, returns null and sets
  // sender_groups_ and first_sender_step_ instead.
  ExchangePtr grid_exchange(const IndexMap& map);

  const Layout& src_;
  const Layout& dst_;
  std::optional<IndexMap> local_map_;  // the map between dims of Layout::shape(); set with a GridExchange
  ExchangePtr only_exchange_;          // set if there is only one sender group
  int64_t sender_groups_ = 1;
  int64_t first_sender_step_ = 1;  // number of replicas from one first sender to the next
};

// Returns the number of elements that all ranks together receive if an item with this map is moved from `src` to `dst`.
// Neither layout may have pending reductions. Throws UserError as the constructor of ItemFamily does.
int64_t total_received_elements(const Layout& src, const Layout& dst, const IndexMap& map);

}  // namespace shardwright
