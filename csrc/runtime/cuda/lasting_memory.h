// Device memory for caches.
//
// PyTorch can direct all allocations of a thread to a memory pool, as it does in the first run of code that
// torch.compile will capture (mode="reduce-overhead"). It raises an error if memory of such a pool is still in use
// after the run. So memory for caches is allocated on a separate thread, whose allocations go to no pool.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>

namespace shardwright {

// Returns `num_bytes` bytes for use on `stream`, which must not be in a capture. Throws c10::OutOfMemoryError.
at::Tensor allocate_lasting(int64_t num_bytes, c10::cuda::CUDAStream stream);

}  // namespace shardwright
