// Flat tensors over existing memory, made without the dispatcher, which costs more than a small copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shardwright {

// `count` elements of a flat tensor, or of a contiguous one of any shape, from element `offset` on. The view takes no
// part in autograd and shares no version counter.
at::Tensor flat_view(const at::Tensor& base, int64_t offset, int64_t count);

// The same memory as uint8.
at::Tensor flat_bytes(const at::Tensor& base, int64_t offset, int64_t count);

}  // namespace shardwright
