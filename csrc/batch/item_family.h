// Makes the exchanges of the items of a batch.
//
// An item whose layouts are partitions and flatten the same dims has a GridExchange of boxes; all other items have an
// IndexedExchange. Items of one family have equal layouts and maps, and share exchanges. If one candidate sender sends
// a whole message, the items of a family alternate the first sender (their sender_group).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "exchange/exchange.h"
#include "exchange/index_map.h"
#include "layout/layout.h"

namespace shardwright {

// Elements are sent in the smaller dtype of source and destination, so the cast is before or after the exchange. If
// both have one size, elements are sent in the destination's dtype.
inline bool travels_as_source(const Layout& src, const Layout& dst) {
  return src.dtype().size_bytes() < dst.dtype().size_bytes();
}
inline DType wire_dtype(const Layout& src, const Layout& dst) {
  return travels_as_source(src, dst) ? src.dtype() : dst.dtype();
}

using ExchangePtr = std::shared_ptr<const Exchange>;

class ItemFamily {
 public:
  // If the shares of candidate senders would be below this, one of them sends a whole message instead.
  static constexpr int64_t kLeastShareBytes = 16 << 10;
  static constexpr int64_t kMaxSenderGroups = 16;  // maximum number of first senders that alternate

  // The layouts must outlive the family and have no pending reductions. Throws UserError on too many runs in a
  // flattened part.
  ItemFamily(const Layout& src, const Layout& dst, const IndexMap& map);

  int64_t sender_groups() const { return sender_groups_; }
  ExchangePtr exchange(int64_t sender_group) const;

 private:
  ExchangePtr grid_exchange(const IndexMap& map);

  const Layout& src_;
  const Layout& dst_;
  std::optional<IndexMap> in_local_dims_;
  ExchangePtr only_;  // set if there is only one sender_group
  int64_t sender_groups_ = 1;
  int64_t replicas_each_ = 1;  // replicas per sender_group
};

// Returns the number of elements that all ranks together receive if the item is moved from `src`.
int64_t received_by_all(const Layout& src, const Layout& dst, const IndexMap& map);

}  // namespace shardwright
