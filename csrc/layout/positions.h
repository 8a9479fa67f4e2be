// The positions of a mesh that differ only in some of its dims.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/mesh.h"

namespace shardwright {

// Returns the positions whose coordinates on all other mesh dims are 0; row-major over the given ones, in their order.
// Added to such a position for other mesh dims, they are offsets.
std::vector<int64_t> positions_along(const Mesh& mesh, const std::vector<int>& mesh_dims);

}  // namespace shardwright
