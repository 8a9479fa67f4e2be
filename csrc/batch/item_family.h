// Makes the exchanges of the items of a batch.
//
// An item whose layouts are partitions and flatten the same dims has a GridExchange of boxes; all other items have an
// IndexedExchange. Items of one family have equal layouts and maps, and share exchanges.
//
// The *first sender* is the replica of the source that sends the first messages of a part (exchange/grid_exchange.h).
// If messages are too small to be shared by replicas, the items of a family alternate between up to kMaxSenderGroups
// first senders, evenly spaced over the replicas. A *sender group* is the index of one of these first senders.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "exchange/exchange.h"
#include "exchange/index_map.h"
#include "layout/layout.h"

namespace shardwright {

// Returns true if elements are sent in the source's dtype and cast afterwards, false if they are cast to the
// destination's dtype and then sent. Elements are sent in the smaller of the two dtypes; if both have one size, in the
// destination's.
inline bool is_sent_as_source(const Layout& src, const Layout& dst) {
  return src.dtype().size_bytes() < dst.dtype().size_bytes();
}
// Returns the dtype in which elements are sent.
inline DType wire_dtype(const Layout& src, const Layout& dst) {
  return is_sent_as_source(src, dst) ? src.dtype() : dst.dtype();
}

using ExchangePtr = std::shared_ptr<const Exchange>;

// The exchanges of all items with two given layouts and a given map: one exchange for each sender group.
class ItemFamily {
 public:
  // Candidate senders share a message evenly if a share has at least this many bytes. Otherwise one of them sends the
  // whole message.
  static constexpr int64_t kLeastShareBytes = 16 << 10;
  static constexpr int64_t kMaxSenderGroups = 16;  // maximum number of first senders that alternate

  // The layouts must outlive the family and have no pending reductions. Throws UserError if a part of a flattened
  // layout has too many runs.
  ItemFamily(const Layout& src, const Layout& dst, const IndexMap& map);

  // Returns the number of sender groups; 1 if first senders do not alternate.
  int64_t sender_groups() const { return sender_groups_; }
  // Returns the exchange of items that take this sender group, in [0, sender_groups()).
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
  int64_t first_sender_step_ = 1;  // from one first sender to the next, in replicas
};

// Returns the number of elements that all ranks together receive if the item is moved from `src`.
int64_t total_received_elements(const Layout& src, const Layout& dst, const IndexMap& map);

}  // namespace shardwright
