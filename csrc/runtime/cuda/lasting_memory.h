// Device memory that outlives a call, for caches.
//
// All allocations of a thread can be diverted to a memory pool, as in the first run of code that torch.compile will
// capture (mode="reduce-overhead"). PyTorch raises an error if memory of such a pool is still in use after the run. So
// memory that is kept is allocated on a thread of its own, whose allocations go to no pool.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>

namespace shardwright {

// Returns memory for use on `stream`, which must not be captured. Throws c10::OutOfMemoryError.
at::Tensor allocate_lasting(int64_t num_bytes, c10::cuda::CUDAStream stream);

}  // namespace shardwright
