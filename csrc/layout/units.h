// Checks that blocks of a tensor dim that share something, such as a scale, stay on one rank each.
#pragma once

#include <cstdint>

#include "layout/layout.h"

namespace shardwright {

// Throws UserError if a rank's part of a tensor dim begins or ends within a block of `unit` elements. Only the last
// block of the dim may be short. The unit of a rule does not ensure this: the rule counts units from the start of the
// part that earlier cuts leave, and that start may be within a block.
void check_blocks_are_whole(const Layout& layout, int tensor_dim, int64_t unit);

}  // namespace shardwright
