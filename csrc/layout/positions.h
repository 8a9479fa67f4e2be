// Positions of a mesh that differ only in some mesh dims.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/mesh.h"

namespace shardwright {

// Returns the positions with all combinations of coordinates on `mesh_dims` and coordinate 0 on all other mesh dims, in
// row-major order over `mesh_dims` as given. They also serve as offsets from a position with coordinate 0 on
// `mesh_dims`.
std::vector<int64_t> positions_along(const Mesh& mesh, const std::vector<int>& mesh_dims);

}  // namespace shardwright
