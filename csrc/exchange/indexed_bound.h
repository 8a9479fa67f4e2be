// Lower bounds where elements may lie on several coordinates of a mesh dim, in any order, or the leading tensor dims
// are flattened on one side only.
#pragma once

#include <cstdint>

#include "exchange/exchange_bound.h"
#include "layout/layout.h"

namespace shardwright {

// With too many cells (exchange/cells.h), what must be sent is a mean: over the ranks of the source if only holders
// send, and over all ranks otherwise. So it is with pending reductions, where nothing is said of nodes either.
ExchangeBound indexed_bound(const Layout& src, const Layout& dst, int64_t ranks_per_node);

}  // namespace shardwright
