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

// Returns stripes of uneven lengths. `stripes` becomes `goal`, on the same mesh, by a gather over some mesh dims. The
// result is `stripes` with the lengths of one of these mesh dims chosen such that the busiest rank sends as little as
// possible in the crossing from `before` and in the gather together. Returns nullopt unless one of these mesh dims
// is the last to cut its tensor dim, and cuts lists of equal length into chunks.
std::optional<Layout> balanced(const Layout& before, const Layout& stripes, const Layout& goal);

// Returns stripes of uneven lengths for all ranks that need the same part of a tensor dim, for a plan of two crossings.
// The first crossing leads from `before` to the result, on a mesh of the ranks of `goal` in the order of their stripes;
// the second from there to `goal`. Returns nullopt if no two ranks need the same part, or if the parts of the tensor
// dim have several thousand runs together.
std::optional<Layout> balanced_relays(const Layout& before, const Layout& goal, int tensor_dim);

}  // namespace shardwright
