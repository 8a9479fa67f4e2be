// Lower bounds on the traffic of every plan from a layout on one mesh to a layout on another.
#pragma once

#include <cstdint>

#include "exchange/exchange_bound.h"
#include "layout/layout.h"

namespace shardwright {

// Returns the bounds for two layouts of one tensor; those of indexed_bound() if they need a rearrangement. A node is
// `ranks_per_node` consecutive ranks. With 0, all ranks are on one node. Throws InvariantError if the shapes or dtypes
// differ, and UserError where axis_grids() does (exchange/axes.h).
ExchangeBound exchange_bound(const Layout& src, const Layout& dst, int64_t ranks_per_node = 0);

}  // namespace shardwright
