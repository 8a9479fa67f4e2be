// Detects writes to a tensor that its version counter does not show.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shardwright {

// Returns a hash of a tensor's content. On CPU it covers all bytes. On other devices it is computed from three sums of
// the elements' bits, and the host waits for them.
uint64_t fingerprint_of(const at::Tensor& tensor);

}  // namespace shardwright
