// Creates 1-D views of tensors without the dispatcher, which would take longer than a small copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shardwright {

// Returns a 1-D view of `count` elements of `base` from element `offset` on. `base` is contiguous, of any shape. The
// view is invisible to autograd and has its own version counter.
at::Tensor flat_view(const at::Tensor& base, int64_t offset, int64_t count);

// Like flat_view, but returns the bytes as uint8. `offset` and `count` are in elements of `base`.
at::Tensor flat_bytes(const at::Tensor& base, int64_t offset, int64_t count);

// Returns a view of flat bytes as elements of `dtype`. The bytes must begin at a multiple of the element size in their
// storage. Bytes at the end that do not fill an element are left out.
at::Tensor flat_elements(const at::Tensor& bytes, at::ScalarType dtype);

}  // namespace shardwright
