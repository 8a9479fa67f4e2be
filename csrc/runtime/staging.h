// A cache of memory for temporaries on CPU.
//
// Fresh pages are expensive: page faults took most of the time of a large sum on Gloo. So the memory of large
// temporaries is kept for the next run, up to kMaxCachedBytes in total, and new memory uses huge pages. On other
// devices PyTorch's caching allocator does this.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shardwright {

constexpr int64_t kMinCachedBytes = int64_t{1} << 20;    // smaller temporaries are not cached
constexpr int64_t kMaxCachedBytes = int64_t{256} << 20;  // maximum size of the cache

// Returns a flat tensor of `count` elements with undefined content. All functions here are thread-safe.
at::Tensor allocate_staging(int64_t count, const at::TensorOptions& options);

// Returns a tensor of allocate_staging to the cache. Nothing, including transfers, may read or write it any more.
void return_staging(const at::Tensor& staging);

// Returns the size of the cached memory that is not in use.
int64_t cached_staging_bytes();
void release_staging();  // frees the cached memory; memory in use is cached again later

// Requests huge pages for a large CPU tensor that nobody has written yet, as PyTorch does under THP_MEM_ALLOC_ENABLE.
void prefer_huge_pages(const at::Tensor& fresh);

}  // namespace shardwright
