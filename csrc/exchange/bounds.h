// Lower bounds on the traffic of every way from a layout on one mesh to a layout on another.
#pragma once

#include <cstdint>

#include "exchange/exchange_bound.h"
#include "layout/layout.h"

namespace shardwright {

// With `ranks_per_node` 0, all ranks are on one node. Otherwise nodes are so many consecutive ranks each.
ExchangeBound exchange_bound(const Layout& src, const Layout& dst, int64_t ranks_per_node = 0);

}  // namespace shardwright
