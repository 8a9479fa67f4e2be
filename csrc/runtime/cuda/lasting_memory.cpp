#include "runtime/cuda/lasting_memory.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <future>

namespace shardwright {

at::Tensor allocate_lasting(int64_t num_bytes, c10::cuda::CUDAStream stream) {
  return std::async(std::launch::async,
                    [&] {
                      // The device is set first: other calls on a new thread would make a context on device 0.
                      const c10::cuda::CUDAStreamGuard guard(stream);
                      // Another thread may be capturing; in the usual mode CUDA would refuse to allocate meanwhile.
                      const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
                      return at::empty({num_bytes}, at::TensorOptions(at::kByte).device(stream.device()));
                    })
      .get();
}

}  // namespace shardwright
