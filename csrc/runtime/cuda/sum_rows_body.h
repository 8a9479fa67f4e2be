// The work of one thread of the kernel that sums rows (sum_rows.cu). It also compiles for the host, where tests call it
// for every thread of a grid.
#pragma once

#include <cstdint>

#include "support/host_device.h"

namespace shardwright {

// The arguments of one sum (expert_rows.h): out[m] = sum over j of weights[m, j] * rows[table[m, j]]. `out`, `table`
// and `weights` are dense; rows are `stride` elements apart. Without weights, `weights` is null.
template <typename Item, typename Weight>
struct RowSums {
  const Item* rows = nullptr;
  const int64_t* table = nullptr;
  const Weight* weights = nullptr;
  Item* out = nullptr;
  int64_t num_sums = 0;  // rows of `out` and of `table`
  int64_t columns = 0;   // of `table`: rows in each sum
  int64_t width = 0;     // elements per row
  int64_t stride = 0;    // elements from one row of `rows` to the next

  static constexpr int kThreads = 256;  // threads per block, one element each

  SHARDWRIGHT_HOST_DEVICE int64_t blocks_per_row() const { return (width + kThreads - 1) / kThreads; }
  SHARDWRIGHT_HOST_DEVICE int64_t num_blocks() const { return num_sums * blocks_per_row(); }

  // Returns the rounded product, as the loops on CPU compute it. A fused multiply-add would give other bits.
  static SHARDWRIGHT_HOST_DEVICE float multiplied(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
  }
  static SHARDWRIGHT_HOST_DEVICE double multiplied(double a, double b) {
#ifdef __CUDA_ARCH__
    return __dmul_rn(a, b);
#else
    return a * b;
#endif
  }

  // Computes one thread's element: 0 if its row of the table has only -1. A thread beyond the last element does
  // nothing. `Sum`, the type of the accumulator, is float or double.
  template <typename Sum>
  SHARDWRIGHT_HOST_DEVICE void run(int64_t block, int thread) const {
    const int64_t m = block / blocks_per_row();
    const int64_t i = block % blocks_per_row() * kThreads + thread;
    if (m >= num_sums || i >= width) return;
    Sum sum = 0;
    bool is_first = true;
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t source_row = table[m * columns + j];
      if (source_row < 0) continue;
      Sum value = static_cast<Sum>(rows[source_row * stride + i]);
      if (weights != nullptr) value = multiplied(static_cast<Sum>(weights[m * columns + j]), value);
      sum = is_first ? value : sum + value;
      is_first = false;
    }
    out[m * width + i] = static_cast<Item>(sum);
  }
};

}  // namespace shardwright
