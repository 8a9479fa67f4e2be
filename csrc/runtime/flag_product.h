// Products that wait, for each chunk of their left operand, until a flag says that the chunk has arrived. They use
// PyTorch's operator for symmetric memory, symm_mem::_async_input_mm. On CUDA it is one persistent CUTLASS kernel for
// compute capability 9.0, which may occupy every multiprocessor while it waits. So nothing that sets a flag may need a
// kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <optional>
#include <string>

namespace shardwright {

// Returns the reason why a device has no such products; nothing if it has them.
std::optional<std::string> why_no_flag_products(c10::Device device);

// Makes the current stream set flags[index] to 1 after the work that was submitted to it so far. `flags`: uint32. On
// CUDA this needs no kernel. Call this function and the next one only if why_no_flag_products returns nothing.
void set_flag(const at::Tensor& flags, int64_t index);

// Returns lhs x rhs, computed on the current stream. Both are bfloat16 matrices; lhs is row-major, rhs row-major or
// column-major. The rows of lhs are divided into one chunk per flag, of equal size. A chunk is read once its flag is
// not 0. Chunk `first` is multiplied first, then the following chunks in cyclic order.
at::Tensor multiply_with_flags(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& flags, int64_t first);

// The functions of one type of device, in a file that is built only with the device's toolkit.
struct FlagSupport {
  // Returns the reason why a device has no products that wait for flags; nothing if it has them.
  std::optional<std::string> (*why_not)(c10::Device device) = nullptr;
  // Returns true once the device has passed an event. Any thread may call it, also while another one captures a graph.
  bool (*is_done)(const c10::Event& event) = nullptr;
};
// Registers the functions of a type of device. Returns true.
bool register_flag_support(c10::DeviceType device, const FlagSupport& support);

// Returns true once the device has passed an event, by FlagSupport::is_done if it is registered. Any thread may call
// it.
bool is_done(const c10::Event& event);

}  // namespace shardwright
