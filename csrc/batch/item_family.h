// The exchanges of the items of a batch.
//
// An item whose layouts are partitions and flatten the same dims is a GridExchange of boxes, all others are an
// IndexedExchange. Items of one family have equal layouts and maps, so they share exchanges; where one sender serves a
// whole message, they take turns in who begins.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "exchange/exchange.h"
#include "exchange/index_map.h"
#include "layout/layout.h"

namespace shardwright {

// Elements travel in the smaller of two dtypes, so that a cast comes before the exchange or after it; in that of the
// destination if they are equally large.
inline bool travels_as_source(const Layout& src, const Layout& dst) {
  return src.dtype().size_bytes() < dst.dtype().size_bytes();
}
inline DType wire_dtype(const Layout& src, const Layout& dst) {
  return travels_as_source(src, dst) ? src.dtype() : dst.dtype();
}

using ExchangePtr = std::shared_ptr<const Exchange>;

class ItemFamily {
 public:
  // If the senders' shares would be below this, one of them sends a whole message instead.
  static constexpr int64_t kLeastShareBytes = 16 << 10;
  static constexpr int64_t kMaxTurns = 16;

  // The layouts must have no pending reductions. Throws UserError if a part that is flattened has too many runs.
  ItemFamily(const Layout& src, const Layout& dst, const IndexMap& map);

  int64_t turns() const { return turns_; }
  ExchangePtr exchange(int64_t turn) const;

 private:
  ExchangePtr grid_exchange(const IndexMap& map);

  const Layout& src_;
  const Layout& dst_;
  std::optional<IndexMap> in_local_dims_;
  ExchangePtr only_;  // if all take the same turn
  int64_t turns_ = 1;
  int64_t replicas_each_ = 1;
};

// The elements that all ranks receive if the item is moved from `src`.
int64_t received_by_all(const Layout& src, const Layout& dst, const IndexMap& map);

}  // namespace shardwright
