// Stripes of unequal lengths, so that ranks that also send in the crossing have less to send in the gather.
//
// A *crossing* is a move from a layout on one mesh to a layout on another. If several ranks need one part, each
// receives a *stripe* of the part in the crossing, and then they gather the stripes.
//
// Example: of 56 rows, ranks 0 to 3 hold 14 each, and ranks 0 to 7 need all. Each receives a stripe and sends it to the
// seven others. With equal stripes of 7 rows, each of ranks 0 to 3 sends 7 or 14 of its rows to the ranks with their
// stripes, and its own stripe seven times: 63 rows. With stripes of 6 rows for ranks 0 to 3 and of 8 for the others,
// every rank sends 56 rows, which is also what ranks 4 to 7 receive.
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
