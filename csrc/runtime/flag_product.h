// Products that wait for a flag of each chunk of their left operand, by PyTorch's operator for symmetric memory
// (symm_mem::_async_input_mm). On CUDA it is one persistent CUTLASS kernel for compute capability 9.0, which may occupy
// every multiprocessor while it waits. So its flags must not depend on any other kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <optional>
#include <string>

namespace shardwright {

// Returns why this device has no such products, or nothing if it has them.
std::optional<std::string> why_no_flag_products(c10::Device device);

// Sets a flag to 1 after the work that the current stream has been given. On CUDA the stream itself does it, without a
// kernel.
void set_flag(const at::Tensor& flags, int64_t index);

// Returns lhs x rhs, computed on the current stream: bfloat16 matrices, lhs row-major, rhs row-major or column-major.
// lhs has one chunk of rows per flag. Chunk `first` is multiplied first; a chunk is read once its flag is not 0.
at::Tensor multiply_as_flagged(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& flags, int64_t first);

// The functions of one type of device, in a file that is built only with its toolkit.
struct FlagSupport {
  // Returns why a device has no products that wait for flags, or nothing if it has them.
  std::optional<std::string> (*why_not)(c10::Device device) = nullptr;
  // Queries an event, on any thread, also while another thread captures a graph.
  bool (*is_done)(const c10::Event& event) = nullptr;
};
bool register_flag_support(c10::DeviceType device, const FlagSupport& support);

// Returns true once the device has passed an event. Any thread may call it.
bool is_done(const c10::Event& event);

}  // namespace shardwright
