// Implements DeviceSumRows (runtime/expert_rows.h) for CUDA, in one launch: every row is read once and the result is
// written once, for any number of columns. The order of the rows and the dtype of the accumulators are the same as on
// CPU, so the results have the same bits.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "runtime/cuda/sum_rows_body.h"
#include "runtime/expert_rows.h"

namespace shardwright {
namespace {

template <typename Item, typename Weight>
__global__ void __launch_bounds__(RowSums<Item, Weight>::kThreads)
    sum_rows_kernel(const __grid_constant__ RowSums<Item, Weight> sums) {
  sums.template run<at::opmath_type<Item>>(blockIdx.x, static_cast<int>(threadIdx.x));
}

// Launches the kernel. Without weights, `weights` is null.
template <typename Item, typename Weight>
void launch(const at::Tensor& rows, const at::Tensor& table, const Weight* weights, at::Tensor& out) {
  const RowSums<Item, Weight> sums{rows.const_data_ptr<Item>(),
                                   table.const_data_ptr<int64_t>(),
                                   weights,
                                   out.mutable_data_ptr<Item>(),
                                   table.size(0),
                                   table.size(1),
                                   rows.size(1),
                                   rows.stride(0)};
  sum_rows_kernel<Item, Weight>
      <<<static_cast<unsigned>(sums.num_blocks()), sums.kThreads, 0, at::cuda::getCurrentCUDAStream()>>>(sums);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// The DeviceSumRows of CUDA.
void sum_rows_on_cuda(const at::Tensor& rows, const at::Tensor& table, const std::optional<at::Tensor>& weights,
                      at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(out.device());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "shardwright::sum_rows", [&] {
    using Item = scalar_t;
    if (!weights) return launch<Item, float>(rows, table, nullptr, out);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, weights->scalar_type(), "shardwright::sum_rows", [&] {
      launch<Item, scalar_t>(rows, table, weights->const_data_ptr<scalar_t>(), out);
    });
  });
}

const bool kRegistered = register_device_sum_rows(at::kCUDA, sum_rows_on_cuda);

}  // namespace
}  // namespace shardwright
