// Strided copies in plain memory, without any preparation of the boxes. The simulator uses them, and tests compare
// prepared copies (strided_copy.h) with them.
#pragma once

#include <cstdint>
#include <vector>

#include "program/program.h"

namespace shardwright {

// Copies the elements of all boxes from `src` to `dst`. Both point to the first element of a buffer with elements of
// item_bytes, and must not overlap.
void copy_boxes(const std::vector<Box>& boxes, const void* src, void* dst, int64_t item_bytes);

}  // namespace shardwright
