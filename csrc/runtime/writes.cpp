#include "runtime/writes.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>

#include <functional>
#include <string_view>

namespace shardwright {

namespace {

// Returns a hash of bytes.
uint64_t hash_of(const void* data, size_t size_bytes) {
  return std::hash<std::string_view>{}({static_cast<const char*>(data), size_bytes});
}

}  // namespace

uint64_t fingerprint_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  const at::NoGradGuard no_grad;
  const at::Tensor dense = tensor.detach().contiguous();
  if (dense.is_cpu()) return hash_of(dense.const_data_ptr(), dense.nbytes());
  const at::Tensor bytes = dense.view({-1}).view(at::kByte);
  const at::Tensor bits = bytes.numel() % 4 == 0 ? bytes.view(at::kInt) : bytes;
  // Returns the sum of every step-th element. The sum of all elements alone would not detect two elements that are
  // swapped.
  const auto sum_of_each = [&](int64_t step) { return bits.slice(0, 0, bits.numel(), step).sum(at::kLong); };
  const at::Tensor sums = at::stack({sum_of_each(1), sum_of_each(3), sum_of_each(7)}).cpu();
  return hash_of(sums.const_data_ptr(), sums.nbytes());
}

}  // namespace shardwright
