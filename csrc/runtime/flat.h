// Creates flat tensors over existing memory without the dispatcher, which would cost more than a small copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shardwright {

// Returns a view of `count` elements from element `offset` on. `base` is flat, or contiguous of any shape. The view
// takes no part in autograd and shares no version counter.
at::Tensor flat_view(const at::Tensor& base, int64_t offset, int64_t count);

// Like flat_view, but as uint8; `offset` and `count` are still in elements of `base`.
at::Tensor flat_bytes(const at::Tensor& base, int64_t offset, int64_t count);

// Returns flat bytes as elements of another dtype. Bytes at the end that do not fill an element are left out.
at::Tensor flat_elements(const at::Tensor& bytes, at::ScalarType dtype);

}  // namespace shardwright
