#include "program/boxes.h"

namespace shardwright {

void simplify(Box& box) {
  size_t kept = 0;
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    if (box.sizes[d] == 1) continue;
    const bool merges = kept > 0 && box.src_strides[kept - 1] == box.src_strides[d] * box.sizes[d] &&
                        box.dst_strides[kept - 1] == box.dst_strides[d] * box.sizes[d];
    if (merges) {
      box.sizes[kept - 1] *= box.sizes[d];
      box.src_strides[kept - 1] = box.src_strides[d];
      box.dst_strides[kept - 1] = box.dst_strides[d];
    } else {
      box.sizes[kept] = box.sizes[d];
      box.src_strides[kept] = box.src_strides[d];
      box.dst_strides[kept] = box.dst_strides[d];
      ++kept;
    }
  }
  box.sizes.resize(kept);
  box.src_strides.resize(kept);
  box.dst_strides.resize(kept);
}

}  // namespace shardwright
