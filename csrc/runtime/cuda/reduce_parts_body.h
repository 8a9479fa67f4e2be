// The work of one thread of the kernel that reduces parts (reduce_parts.cu). It also compiles for the host, where tests
// call it for every thread of a grid.
#pragma once

#include <cstdint>

#include "support/host_device.h"

namespace shardwright {

inline constexpr int kReduceThreads = 256;    // threads per block, one word each
inline constexpr int kMaxReducedParts = 256;  // 2 KiB of the 4 KiB of kernel arguments that every GPU supports

// The addresses of the parts, as a kernel argument.
template <typename Item>
struct ReducedParts {
  const Item* at[kMaxReducedParts];
};

// A word: kItems elements that a thread loads and stores at once.
template <typename Item, int kItems>
struct alignas(sizeof(Item) * kItems) ItemWord {
  Item items[kItems];
};

struct SumOfTwo {
  template <typename T>
  SHARDWRIGHT_HOST_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};

struct ProductOfTwo {
  template <typename T>
  SHARDWRIGHT_HOST_DEVICE T operator()(T a, T b) const {
    return a * b;
  }
};

// MinOfTwo and MaxOfTwo return NaN if either operand is NaN, as torch.minimum and torch.maximum do.
struct MinOfTwo {
  template <typename T>
  SHARDWRIGHT_HOST_DEVICE T operator()(T a, T b) const {
    return a != a || a < b ? a : b;
  }
};

struct MaxOfTwo {
  template <typename T>
  SHARDWRIGHT_HOST_DEVICE T operator()(T a, T b) const {
    return a != a || a > b ? a : b;
  }
};

// Returns the number of thread blocks for this many words.
inline int64_t num_reduce_blocks(int64_t words) { return (words + kReduceThreads - 1) / kReduceThreads; }

// Reduces one thread's word over all parts, in their order, with accumulators of type `Accumulator`, and divides the
// result. There is at least one part, and all addresses are aligned to words. A thread beyond the last word does
// nothing.
template <typename Accumulator, int kItems, typename Combine, typename Item>
SHARDWRIGHT_HOST_DEVICE void reduce_word(int64_t block, int thread, const ReducedParts<Item>& parts, int num_parts,
                                         int64_t num_words, double divisor, Item* dst) {
  using Word = ItemWord<Item, kItems>;
  const int64_t w = block * kReduceThreads + thread;
  if (w >= num_words) return;
  const Combine combine;
  Accumulator accumulated[kItems];
  const Word first = reinterpret_cast<const Word*>(parts.at[0])[w];
  SHARDWRIGHT_UNROLL
  for (int i = 0; i < kItems; ++i) accumulated[i] = static_cast<Accumulator>(first.items[i]);
#ifdef __CUDACC__
#pragma unroll 4
#endif
  for (int m = 1; m < num_parts; ++m) {
    const Word word = reinterpret_cast<const Word*>(parts.at[m])[w];
    SHARDWRIGHT_UNROLL
    for (int i = 0; i < kItems; ++i) accumulated[i] = combine(accumulated[i], static_cast<Accumulator>(word.items[i]));
  }
  Word result;
  SHARDWRIGHT_UNROLL
  for (int i = 0; i < kItems; ++i) {
    if (divisor != 1) accumulated[i] = accumulated[i] / static_cast<Accumulator>(divisor);
    result.items[i] = static_cast<Item>(accumulated[i]);
  }
  reinterpret_cast<Word*>(dst)[w] = result;
}

}  // namespace shardwright
