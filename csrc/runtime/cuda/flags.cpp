// Implements FlagSupport (flag_product.h) for CUDA.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include "runtime/flag_product.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Returns the reason why a device cannot run the kernel of products that wait for flags; nothing if it can.
std::optional<std::string> why_no_kernel(c10::Device device) {
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(device.index());
  if (properties->major == 9 && properties->minor == 0) return std::nullopt;
  return concat(device.str(), " has compute capability ", properties->major, ".", properties->minor,
                ", but the kernel requires 9.0");
}

// Returns true once the device has passed an event. Uses this thread's relaxed capture mode, because another thread may
// be capturing a graph.
bool has_passed(const c10::Event& event) {
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  return event.query();
}

const bool kRegistered = register_flag_support(c10::DeviceType::CUDA, {why_no_kernel, has_passed});

}  // namespace
}  // namespace shardwright
