#include "runtime/flag_product.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>

#include "support/error.h"

namespace shardwright {
namespace {

// Names of PyTorch's operators.
constexpr const char* kProduct = "symm_mem::_async_input_mm";
constexpr const char* kSetFlag = "symm_mem::stream_write_value32_";

// Returns the functions that are registered for a type of device; null if none are.
FlagSupport& support_of(c10::DeviceType device) {
  static std::array<FlagSupport, c10::COMPILE_TIME_MAX_DEVICE_TYPES> all;
  return all[static_cast<size_t>(device)];
}

// Returns an operator of PyTorch; nothing if this torch lacks it. Callers use boxed calls, because torch versions
// register the kernels with different C++ signatures.
std::optional<c10::OperatorHandle> operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchema({name, ""});
}

// True if this torch has a kernel of an operator for a type of device.
bool has_kernel(const char* name, c10::Device device) {
  const auto key = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1;
  const auto op = operator_named(name);
  return op && op->hasKernelForDispatchKey(key);
}

}  // namespace

bool register_flag_support(c10::DeviceType device, const FlagSupport& support) {
  support_of(device) = support;
  return true;
}

std::optional<std::string> why_no_flag_products(c10::Device device) {
  for (const char* name : {kProduct, kSetFlag}) {
    if (!has_kernel(name, device)) return concat("this torch has no ", name, " for ", device.str());
  }
  const FlagSupport& support = support_of(device.type());
  return support.why_not == nullptr ? std::nullopt : support.why_not(device);
}

void set_flag(const at::Tensor& flags, int64_t index) {
  torch::jit::Stack stack{flags, index, int64_t{1}};
  operator_named(kSetFlag)->callBoxed(stack);
}

at::Tensor multiply_with_flags(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& flags, int64_t first) {
  torch::jit::Stack stack{lhs, rhs, flags, first};
  operator_named(kProduct)->callBoxed(stack);
  return stack.at(0).toTensor();
}

bool is_done(const c10::Event& event) {
  const FlagSupport& support = support_of(event.device_type());
  return support.is_done == nullptr ? event.query() : support.is_done(event);
}

}  // namespace shardwright
