// Makes flat tensors over existing memory without the dispatcher, which would cost more than a small copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shardwright {

// Returns a view of `count` elements from element `offset` on, of a flat tensor or a contiguous one of any shape. The
// view takes no part in autograd and shares no version counter.
at::Tensor flat_view(const at::Tensor& base, int64_t offset, int64_t count);

// The same memory as uint8.
at::Tensor flat_bytes(const at::Tensor& base, int64_t offset, int64_t count);

// Returns flat bytes as elements of another dtype, without the bytes at the end that do not fill one.
at::Tensor flat_elements(const at::Tensor& bytes, at::ScalarType dtype);

}  // namespace shardwright
