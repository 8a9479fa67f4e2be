#include "layout/positions.h"

#include <utility>

namespace shardwright {

std::vector<int64_t> positions_along(const Mesh& mesh, const std::vector<int>& mesh_dims) {
  std::vector<int64_t> positions{0};
  for (const int d : mesh_dims) {
    std::vector<int64_t> longer;
    for (const int64_t position : positions) {
      for (int64_t c = 0; c < mesh.dim_size(d); ++c) longer.push_back(position + c * mesh.stride(d));
    }
    positions = std::move(longer);
  }
  return positions;
}

}  // namespace shardwright
