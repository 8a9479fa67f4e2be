// Lower bounds for layouts in which an element may be stored on several coordinates of a mesh dim or in any order, and
// for layouts of which only one flattens the leading tensor dims.
#pragma once

#include <cstdint>

#include "exchange/exchange_bound.h"
#include "layout/layout.h"

namespace shardwright {

// Returns the bounds for two layouts of one tensor. A node is `ranks_per_node` consecutive ranks; with 0, all ranks are
// on one node.
//
// With too many cells (exchange/cells.h) or pending reductions, the sent bytes are means: over the ranks of the source
// if only candidate senders send and no reduction is pending, otherwise over all ranks. With pending reductions the
// bounds of nodes are 0.
ExchangeBound indexed_bound(const Layout& src, const Layout& dst, int64_t ranks_per_node);

}  // namespace shardwright
