// Reductions on the GPU: every part is read once and the result written once. The order of the parts and the
// accumulators are the same as on CPU, so the bits are the same.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "runtime/local_ops.h"

namespace shardwright {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxParts = 256;  // 2 KiB of the 4 KiB of kernel arguments that every GPU takes
constexpr int kWordBytes = 16;

template <typename Item>
struct Parts {
  const Item* at[kMaxParts];
};

template <typename Item, int kItems>
struct alignas(sizeof(Item) * kItems) Word {
  Item items[kItems];
};

struct Sum {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Product {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a * b;
  }
};

// NaN wins, as in torch.minimum and torch.maximum.
struct Min {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a != a || a < b ? a : b;
  }
};

struct Max {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a != a || a > b ? a : b;
  }
};

// Each thread reduces one word of every part.
template <typename Item, int kItems, typename Combine>
__global__ void __launch_bounds__(kThreads) reduce_words(const __grid_constant__ Parts<Item> parts, int num_parts,
                                                         int64_t num_words, double divisor, Item* dst) {
  using Accumulator = at::opmath_type<Item>;
  using ItemWord = Word<Item, kItems>;
  const int64_t w = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (w >= num_words) return;
  const Combine combine;
  Accumulator found[kItems];
  const ItemWord first = reinterpret_cast<const ItemWord*>(parts.at[0])[w];
#pragma unroll
  for (int i = 0; i < kItems; ++i) found[i] = static_cast<Accumulator>(first.items[i]);
#pragma unroll 4
  for (int m = 1; m < num_parts; ++m) {
    const ItemWord word = reinterpret_cast<const ItemWord*>(parts.at[m])[w];
#pragma unroll
    for (int i = 0; i < kItems; ++i) found[i] = combine(found[i], static_cast<Accumulator>(word.items[i]));
  }
  ItemWord result;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (divisor != 1) found[i] = found[i] / static_cast<Accumulator>(divisor);
    result.items[i] = static_cast<Item>(found[i]);
  }
  reinterpret_cast<ItemWord*>(dst)[w] = result;
}

template <typename Item, int kItems, typename Combine>
void launch(const Parts<Item>& parts, int num_parts, int64_t num_words, double divisor, Item* dst) {
  if (num_words == 0) return;
  const auto blocks = static_cast<unsigned>((num_words + kThreads - 1) / kThreads);
  reduce_words<Item, kItems, Combine>
      <<<blocks, kThreads, 0, at::cuda::getCurrentCUDAStream()>>>(parts, num_parts, num_words, divisor, dst);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// Reduces in wide words if all addresses allow that, and the remaining elements one by one.
template <typename Item, typename Combine>
void reduce_items(const std::vector<at::Tensor>& given, double divisor, at::Tensor& dst) {
  constexpr int kItems = kWordBytes / sizeof(Item);
  Parts<Item> parts;
  auto* to = dst.mutable_data_ptr<Item>();
  const auto is_aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % kWordBytes == 0; };
  bool are_aligned = is_aligned(to);
  for (size_t m = 0; m < given.size(); ++m) {
    parts.at[m] = given[m].const_data_ptr<Item>();
    are_aligned = are_aligned && is_aligned(parts.at[m]);
  }
  const auto num_parts = static_cast<int>(given.size());
  const int64_t num_words = are_aligned ? dst.numel() / kItems : 0;
  launch<Item, kItems, Combine>(parts, num_parts, num_words, divisor, to);
  const int64_t done = num_words * kItems;
  for (int m = 0; m < num_parts; ++m) parts.at[m] += done;
  launch<Item, 1, Combine>(parts, num_parts, dst.numel() - done, divisor, to + done);
}

bool reduce_on_cuda(ReduceOp op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor& dst) {
  const bool is_known =
      op == ReduceOp::kSum || op == ReduceOp::kProduct || op == ReduceOp::kMin || op == ReduceOp::kMax;
  if (!is_known || !dst.is_floating_point() || parts.size() > kMaxParts) return false;
  const c10::cuda::CUDAGuard guard(dst.device());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dst.scalar_type(), "shardwright::reduce_parts", [&] {
    if (op == ReduceOp::kSum) {
      reduce_items<scalar_t, Sum>(parts, divisor, dst);
    } else if (op == ReduceOp::kProduct) {
      reduce_items<scalar_t, Product>(parts, divisor, dst);
    } else if (op == ReduceOp::kMin) {
      reduce_items<scalar_t, Min>(parts, divisor, dst);
    } else {
      reduce_items<scalar_t, Max>(parts, divisor, dst);
    }
  });
  return true;
}

const bool kRegistered = register_device_reduce(at::kCUDA, reduce_on_cuda);

}  // namespace
}  // namespace shardwright
