// Hashes of the content of tensors, which detect writes that do not change a tensor's version counter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shardwright {

// Returns a hash of a tensor's content, without its shape and dtype; 0 if it has no elements. On CPU it covers all
// bytes. On other devices it is the hash of three sums of the content, viewed as integers, and the host waits for the
// sums.
uint64_t fingerprint_of(const at::Tensor& tensor);

}  // namespace shardwright
