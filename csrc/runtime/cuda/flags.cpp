// FlagSupport of CUDA (flag_product.h).
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include "runtime/flag_product.h"
#include "support/error.h"

namespace shardwright {
namespace {

std::optional<std::string> why_not_here(c10::Device device) {
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(device.index());
  if (properties->major == 9 && properties->minor == 0) return std::nullopt;
  return concat(device.str(), " has compute capability ", properties->major, ".", properties->minor,
                ", but the kernel requires 9.0");
}

// Queries an event in this thread's relaxed capture mode: another thread may be capturing a graph.
bool has_ended(const c10::Event& event) {
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  return event.query();
}

const bool kRegistered = register_flag_support(c10::DeviceType::CUDA, {why_not_here, has_ended});

}  // namespace
}  // namespace shardwright
