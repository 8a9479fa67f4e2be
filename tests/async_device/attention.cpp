// Fused attention on the test device: the CPU's, through PyTorch's operators for PrivateUse1 devices. Keys have as many
// heads as queries.
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

namespace async_device {
namespace {

using Result = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
                          at::Tensor, at::Tensor>;

Result attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& bias,
              double dropout, bool is_causal, bool /*return_debug_mask*/, std::optional<double> scale) {
  TORCH_CHECK(q.size(1) == k.size(1), "async_device: keys have ", k.size(1), " heads, queries have ", q.size(1));
  const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, is_causal, bias, scale);
  const at::Tensor none;
  return {out, lse, none, none, q.sym_size(2), k.sym_size(2), none, none, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attend_backward(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& bias,
    std::array<bool, 4> /*wanted*/, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& /*cum_seq_q*/,
    const at::Tensor& /*cum_seq_k*/, c10::SymInt /*max_q*/, c10::SymInt /*max_k*/, double dropout, bool is_causal,
    const at::Tensor& /*seed*/, const at::Tensor& /*offset*/, std::optional<double> scale) {
  const std::optional<at::Tensor> mask = bias.defined() ? std::optional(bias) : std::nullopt;
  const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, dropout,
                                                                                     is_causal, mask, scale);
  return {dq, dk, dv, at::Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attend);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attend_backward);
}

}  // namespace async_device
