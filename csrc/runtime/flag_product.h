// Products that wait for a flag of each chunk of their left operand, by PyTorch's operators for symmetric memory
// (symm_mem::_async_input_mm). On CUDA it is one persistent kernel of CUTLASS for compute capability 9.0, which may
// take every multiprocessor while it waits. So nothing that its flags depend on may be a kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <optional>
#include <string>

namespace shardwright {

// Returns why there are no such products on this device, or nothing if there are.
std::optional<std::string> why_no_flag_products(c10::Device device);

// Sets a flag, after everything that the current stream holds. On CUDA the stream itself does it, without a kernel.
void set_flag(const at::Tensor& flags, int64_t index);

// Returns lhs x rhs: bfloat16 matrices, lhs row-major, rhs row-major or column-major. Computed on the current stream,
// chunk by chunk from chunk `first` on; a chunk of rows is read once its flag is not 0.
at::Tensor multiply_as_flagged(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& flags, int64_t first);

// The functions that a type of device adds, in a file that is built only with its toolkit.
struct FlagSupport {
  std::optional<std::string> (*why_not)(c10::Device device) = nullptr;
  // Queries an event on any thread, also while another thread captures a graph.
  bool (*is_done)(const c10::Event& event) = nullptr;
};
bool register_flag_support(c10::DeviceType device, const FlagSupport& support);

// Returns whether the device has come to an event. May be called on any thread.
bool is_done(const c10::Event& event);

}  // namespace shardwright
