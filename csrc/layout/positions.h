// Positions of a mesh that differ only in some mesh dims.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/mesh.h"

namespace shardwright {

// Returns the positions with coordinate 0 on all other mesh dims, row-major over `mesh_dims` in the given order. They
// also serve as offsets from a position with coordinate 0 on `mesh_dims`.
std::vector<int64_t> positions_along(const Mesh& mesh, const std::vector<int>& mesh_dims);

}  // namespace shardwright
