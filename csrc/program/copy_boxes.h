// Strided copies in plain memory, without any preparation of the boxes. The simulator uses them, and tests compare
// prepared copies (strided_copy.h) with them.
#pragma once

#include <cstdint>
#include <vector>

#include "program/program.h"

namespace shardwright {

// `src` and `dst` point to row-major arrays of elements of item_bytes. They must not overlap.
void copy_boxes(const std::vector<Box>& boxes, const void* src, void* dst, int64_t item_bytes);

}  // namespace shardwright
