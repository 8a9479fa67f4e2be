// Blocks of a tensor dim that have something in common, such as a scale, and are to stay on one rank each.
#pragma once

#include <cstdint>

#include "layout/layout.h"

namespace shardwright {

// Throws UserError if some rank's part of a tensor dim begins or ends within a block of `unit` elements; only the last
// block may be shorter. Rules with a unit cut the parts that earlier cuts leave at multiples of it, which are multiples
// in the whole dim only if those parts begin at one.
void check_blocks_are_whole(const Layout& layout, int tensor_dim, int64_t unit);

}  // namespace shardwright
