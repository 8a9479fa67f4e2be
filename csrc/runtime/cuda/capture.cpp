// Reports whether a CUDA graph is being captured on a stream, because c10 cannot do so in every supported torch.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "runtime/side_stream.h"

namespace shardwright {
namespace {

bool is_capturing_on(c10::Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::CUDAStream(stream).stream(), &status));
  return status != cudaStreamCaptureStatusNone;
}

const bool kRegistered = register_capture_query(c10::DeviceType::CUDA, is_capturing_on);

}  // namespace
}  // namespace shardwright
