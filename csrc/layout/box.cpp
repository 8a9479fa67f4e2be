#include "layout/box.h"

namespace shardwright {

void Box::simplify() {
  size_t merged_dims = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1) continue;
    const bool merges = merged_dims > 0 && src_strides[merged_dims - 1] == src_strides[d] * sizes[d] &&
                        dst_strides[merged_dims - 1] == dst_strides[d] * sizes[d];
    if (!merges) ++merged_dims;
    sizes[merged_dims - 1] = merges ? sizes[merged_dims - 1] * sizes[d] : sizes[d];
    src_strides[merged_dims - 1] = src_strides[d];
    dst_strides[merged_dims - 1] = dst_strides[d];
  }
  sizes.resize(merged_dims);
  src_strides.resize(merged_dims);
  dst_strides.resize(merged_dims);
}

int64_t extent_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  int64_t extent = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    extent += (sizes[d] - 1) * strides[d];
  }
  return extent;
}

std::vector<int64_t> row_major_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (int d = static_cast<int>(shape.size()) - 2; d >= 0; --d) strides[d] = strides[d + 1] * shape[d + 1];
  return strides;
}

}  // namespace shardwright
