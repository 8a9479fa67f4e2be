#include "program/copy_boxes.h"

#include <cstring>

namespace shardwright {
namespace {

// Copies `count` elements. Strides are in elements.
template <typename Item>
void copy_run(const Item* src, int64_t src_stride, Item* dst, int64_t dst_stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) dst[i * dst_stride] = src[i * src_stride];
}

// Copies the innermost dim of a box, of `count` elements of `item` bytes. Strides are in elements.
void copy_innermost(const char* src, int64_t src_stride, char* dst, int64_t dst_stride, int64_t count, int64_t item) {
  if (src_stride == 1 && dst_stride == 1) {
    std::memcpy(dst, src, static_cast<size_t>(count * item));
    return;
  }
  switch (item) {
    case 1:
      return copy_run(src, src_stride, dst, dst_stride, count);
    case 2:
      return copy_run(reinterpret_cast<const uint16_t*>(src), src_stride, reinterpret_cast<uint16_t*>(dst), dst_stride,
                      count);
    case 4:
      return copy_run(reinterpret_cast<const uint32_t*>(src), src_stride, reinterpret_cast<uint32_t*>(dst), dst_stride,
                      count);
    case 8:
      return copy_run(reinterpret_cast<const uint64_t*>(src), src_stride, reinterpret_cast<uint64_t*>(dst), dst_stride,
                      count);
    default:
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(dst + i * dst_stride * item, src + i * src_stride * item, static_cast<size_t>(item));
      }
  }
}

// Copies dim `dim` of a box and all dims inside it. `src` and `dst` are the addresses of its first element, `item` is
// the number of bytes of an element.
void copy_dims(const Box& box, size_t dim, const char* src, char* dst, int64_t item) {
  if (box.sizes.empty()) {
    std::memcpy(dst, src, static_cast<size_t>(item));
    return;
  }
  if (dim + 1 == box.sizes.size()) {
    copy_innermost(src, box.src_strides[dim], dst, box.dst_strides[dim], box.sizes[dim], item);
    return;
  }
  for (int64_t i = 0; i < box.sizes[dim]; ++i) {
    copy_dims(box, dim + 1, src + i * box.src_strides[dim] * item, dst + i * box.dst_strides[dim] * item, item);
  }
}

}  // namespace

void copy_boxes(const std::vector<Box>& boxes, const void* src, void* dst, int64_t item_bytes) {
  for (const Box& box : boxes) {
    copy_dims(box, 0, static_cast<const char*>(src) + box.src_offset * item_bytes,
              static_cast<char*>(dst) + box.dst_offset * item_bytes, item_bytes);
  }
}

}  // namespace shardwright
