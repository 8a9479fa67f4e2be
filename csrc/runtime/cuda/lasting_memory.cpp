#include "runtime/cuda/lasting_memory.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <future>

namespace shardwright {

at::Tensor allocate_lasting(int64_t num_bytes, c10::cuda::CUDAStream stream) {
  return std::async(std::launch::async,
                    [&] {
                      // Another thread may be capturing; in the usual mode CUDA would refuse to allocate meanwhile.
                      const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
                      const c10::cuda::CUDAStreamGuard guard(stream);
                      return at::empty({num_bytes}, at::TensorOptions(at::kByte).device(stream.device()));
                    })
      .get();
}

}  // namespace shardwright
