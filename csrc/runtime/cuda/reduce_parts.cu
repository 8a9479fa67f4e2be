// Implements DeviceReduce (runtime/local_ops.h) for CUDA: every part is read once and the result is written once. The
// order of the parts and the dtype of the accumulators are the same as on CPU, so the results have the same bits.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "runtime/cuda/reduce_parts_body.h"
#include "runtime/local_ops.h"

namespace shardwright {
namespace {

constexpr int kWordBytes = 16;  // the largest load of one thread

template <typename Item, int kItems, typename Combine>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_words(const __grid_constant__ ReducedParts<Item> parts, int num_parts, int64_t num_words, double divisor,
                 Item* dst) {
  reduce_word<at::opmath_type<Item>, kItems, Combine>(blockIdx.x, static_cast<int>(threadIdx.x), parts, num_parts,
                                                      num_words, divisor, dst);
}

// Launches the reduction of `num_words` words of kItems elements each.
template <typename Item, int kItems, typename Combine>
void launch(const ReducedParts<Item>& parts, int num_parts, int64_t num_words, double divisor, Item* dst) {
  if (num_words == 0) return;
  const auto blocks = static_cast<unsigned>(num_reduce_blocks(num_words));
  reduce_words<Item, kItems, Combine>
      <<<blocks, kReduceThreads, 0, at::cuda::getCurrentCUDAStream()>>>(parts, num_parts, num_words, divisor, dst);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// Reduces tensors: in words of 16 bytes if all addresses are multiples of 16, and the remaining elements one by one.
template <typename Item, typename Combine>
void reduce_items(const std::vector<at::Tensor>& tensors, double divisor, at::Tensor& dst) {
  constexpr int kItems = kWordBytes / sizeof(Item);
  ReducedParts<Item> parts;
  auto* to = dst.mutable_data_ptr<Item>();
  const auto is_aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % kWordBytes == 0; };
  bool are_aligned = is_aligned(to);
  for (size_t m = 0; m < tensors.size(); ++m) {
    parts.at[m] = tensors[m].const_data_ptr<Item>();
    are_aligned = are_aligned && is_aligned(parts.at[m]);
  }
  const auto num_parts = static_cast<int>(tensors.size());
  const int64_t num_words = are_aligned ? dst.numel() / kItems : 0;
  launch<Item, kItems, Combine>(parts, num_parts, num_words, divisor, to);
  const int64_t done = num_words * kItems;
  for (int m = 0; m < num_parts; ++m) parts.at[m] += done;
  launch<Item, 1, Combine>(parts, num_parts, dst.numel() - done, divisor, to + done);
}

// The DeviceReduce of CUDA: sums, products, minima and maxima of floating dtypes.
bool reduce_on_cuda(ReduceOp op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor& dst) {
  const bool is_known =
      op == ReduceOp::kSum || op == ReduceOp::kProduct || op == ReduceOp::kMin || op == ReduceOp::kMax;
  if (!is_known || !dst.is_floating_point() || parts.size() > kMaxReducedParts) return false;
  const c10::cuda::CUDAGuard guard(dst.device());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dst.scalar_type(), "shardwright::reduce_parts", [&] {
    if (op == ReduceOp::kSum) {
      reduce_items<scalar_t, SumOfTwo>(parts, divisor, dst);
    } else if (op == ReduceOp::kProduct) {
      reduce_items<scalar_t, ProductOfTwo>(parts, divisor, dst);
    } else if (op == ReduceOp::kMin) {
      reduce_items<scalar_t, MinOfTwo>(parts, divisor, dst);
    } else {
      reduce_items<scalar_t, MaxOfTwo>(parts, divisor, dst);
    }
  });
  return true;
}

const bool kRegistered = register_device_reduce(at::kCUDA, reduce_on_cuda);

}  // namespace
}  // namespace shardwright
