// Notices writes to a tensor that its version counter does not show.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shardwright {

// Returns a number that differs, but for chance, between contents of a tensor. On CPU it is a hash of all bytes. On
// other devices it comes from three sums of the elements' bits, and the host waits for them.
uint64_t fingerprint_of(const at::Tensor& tensor);

}  // namespace shardwright
