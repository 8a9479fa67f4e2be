// Stripes of unequal lengths, so that ranks that also serve others have less to pass on.
//
// 56 rows, of which ranks 0 to 3 hold 14 each and ranks 0 to 7 need all. Each receives a stripe and sends it to the
// seven others. With equal stripes of 7 rows, each of the first four sends 7 or 14 rows of its own to those whose
// stripe they are, and its stripe seven times: 63 rows. With stripes of 6 rows for them and of 8 for the others, all
// send 56 rows, and so many is what the others receive.
#pragma once

#include <optional>

#include "layout/layout.h"

namespace shardwright {

// `stripes` becomes `goal`, on the same mesh, by gathering some mesh dims. Returns stripes of which one of these mesh
// dims cuts such lengths that the busiest rank sends as little as possible in the crossing from `before` and in the
// gather together, as far as lengths can change that. Returns nullopt if no such mesh dim cuts lists of one length,
// last of its tensor dim and into chunks.
std::optional<Layout> balanced(const Layout& before, const Layout& stripes, const Layout& goal);

// The same with stripes of any lengths for all ranks that need the same part of a tensor dim, between two crossings.
// The first leads from `before` to the layout that is returned, on a mesh of the ranks of `goal` in the order of their
// stripes, the second from there to `goal`. Returns nullopt if nobody needs the same as another rank, or if the parts
// of the tensor dim are several thousand runs together.
std::optional<Layout> balanced_relays(const Layout& before, const Layout& goal, int tensor_dim);

}  // namespace shardwright
