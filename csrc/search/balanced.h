// Stripes of unequal lengths, so that ranks that also send in the crossing have less to send in the gather.
//
// A *crossing* is a move from a layout on one mesh to a layout on another. If several ranks need one part, each
// receives a *stripe* of the part in the crossing, and then they gather the stripes.
//
// Example: of 56 rows, ranks 0 to 3 hold 14 each, and ranks 0 to 7 need all. Each receives a stripe in the crossing and
// sends it to the seven others in the gather.
//
//   stripes                    rows sent by ranks 0 to 7, crossing + 7 x stripe
//   7, 7, 7, 7, 7, 7, 7, 7     7 + 49, 14 + 49, 14 + 49, 14 + 49, 49, 49, 49, 49: at most 63
//   7, 6, 6, 6, 7, 8, 8, 8     7 + 49, 14 + 42, 14 + 42, 14 + 42, 49, 56, 56, 56: at most 56
#pragma once

#include <optional>

#include "layout/layout.h"

namespace shardwright {

// Returns the layout after a crossing from `before`, with stripes of unequal lengths. `stripes` has stripes of equal
// lengths, and a gather over some mesh dims leads from it to `goal`, on the same mesh. In the result, one of these mesh
// dims cuts its stripes so that the busiest rank sends as little as possible in the crossing and the gather together.
// This mesh dim must be the last to cut its tensor dim, and must cut lists of equal length into chunks; of several such
// mesh dims, the largest is chosen. Returns nullopt if there is none, or if these lists are empty. No layout may have
// partials.
std::optional<Layout> balanced_stripes(const Layout& before, const Layout& stripes, const Layout& goal);

// Returns the layout between two crossings, from `before` to the result and from the result to `goal`. Ranks of `goal`
// that need the same part of the tensor dim have stripes of the part in the result, of any lengths, so that the busiest
// rank sends as little as possible in both crossings together. The result has a mesh of its own: its first dim,
// "relay", lists ranks of `goal` in the order of their stripes. Returns nullopt if no mesh dim of `goal` replicates, if
// the tensor is empty, or if the parts of the tensor dim have more than 4,096 runs together. Neither layout may have
// partials.
std::optional<Layout> balanced_relays(const Layout& before, const Layout& goal, int tensor_dim);

}  // namespace shardwright
