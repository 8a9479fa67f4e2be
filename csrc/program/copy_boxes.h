// Strided copies in plain memory, exactly as boxes describe them. The simulator uses these; tests compare prepared
// copies (strided_copy.h) with them.
#pragma once

#include <cstdint>
#include <vector>

#include "program/program.h"

namespace shardwright {

// src and dst are the starts of row-major arrays of elements of item_bytes. They must not overlap.
void copy_boxes(const std::vector<Box>& boxes, const void* src, void* dst, int64_t item_bytes);

}  // namespace shardwright
