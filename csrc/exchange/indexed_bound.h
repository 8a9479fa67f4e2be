// Lower bounds for layouts in which an element may be stored on several coordinates of a mesh dim or in any order, and
// for layouts of which only one flattens the leading tensor dims.
#pragma once

#include <cstdint>

#include "exchange/exchange_bound.h"
#include "layout/layout.h"

namespace shardwright {

// Returns the bounds for two layouts of one tensor. A node is `ranks_per_node` consecutive ranks; with 0, all ranks are
// on one node. Throws UserError where axis_grids() does (exchange/axes.h).
//
// Reductions that stay pending do not count below: each coordinate of their mesh dims has a tensor of its own. With too
// many cells (exchange/cells.h) or reductions to do, the sent bytes are means: over the ranks of the source if only
// candidate senders send and there is no reduction to do, otherwise over all ranks; and the bounds of nodes are 0. All
// bounds are 0 if mesh dims become partial and there is no reduction to do. Bounds per rank of a node are also given
// for nodes of more than ExchangeBound::kMaxNode ranks.
ExchangeBound indexed_bound(const Layout& src, const Layout& dst, int64_t ranks_per_node);

}  // namespace shardwright
