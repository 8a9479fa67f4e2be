// A box: the elements of one strided copy from a source array to a destination array. All local copies are lists of
// boxes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardwright {

// Offsets and strides are in elements. Dims are listed outermost first. A box without dims has one element.
struct Box {
  int64_t src_offset = 0;
  int64_t dst_offset = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> src_strides;
  std::vector<int64_t> dst_strides;

  // Adds an innermost dim.
  void add_dim(int64_t size, int64_t src_stride, int64_t dst_stride) {
    sizes.push_back(size);
    src_strides.push_back(src_stride);
    dst_strides.push_back(dst_stride);
  }

  // Drops dims of size 1, and merges neighboring dims that are dense on both sides, so that inner runs get long.
  // Sizes (3,4) with strides (4,1) and (8,1) stay as they are. With strides (4,1) and (4,1) they become one run of 12.
  void simplify();
};

// Returns the length of the memory range from the first element to the last, in elements: 0 if there is no element, 1
// without dims. Strides must not be negative.
int64_t extent_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

// Returns the strides of a dense row-major array, in elements.
std::vector<int64_t> row_major_strides(const std::vector<int64_t>& shape);

}  // namespace shardwright
