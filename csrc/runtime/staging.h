// Memory for temporaries on CPU (*staging memory*), with a cache.
//
// New pages are expensive: page faults took most of the time of a large sum on Gloo. So the memory of large temporaries
// is cached for later runs, up to kMaxCachedBytes in total, and new memory uses huge pages. On other devices PyTorch's
// allocator caches memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shardwright {

constexpr int64_t kMinCachedBytes = int64_t{1} << 20;    // smaller temporaries are not cached
constexpr int64_t kMaxCachedBytes = int64_t{256} << 20;  // maximum size of the cache

// Returns a flat tensor of `count` elements with undefined content. On CPU its memory is from the cache if possible,
// and its storage may be up to twice as large as needed. All functions here are thread-safe.
at::Tensor allocate_staging(int64_t count, const at::TensorOptions& options);

// Gives the memory of a tensor from allocate_staging back to the cache, unless it is smaller than kMinCachedBytes or
// larger than kMaxCachedBytes. Smaller cached blocks are freed if the cache gets too large. Nothing, including
// transfers, may use the tensor any more. Does nothing for undefined tensors and for other devices.
void return_staging(const at::Tensor& staging);

// Returns the size of the cached memory in bytes, without memory that is in use.
int64_t cached_staging_bytes();
// Frees the cached memory. Memory in use is cached when it is returned.
void release_staging();

// Requests huge pages for a CPU tensor of at least 8 MiB that was not written yet, as PyTorch does if
// THP_MEM_ALLOC_ENABLE is set. Does nothing for other tensors.
void prefer_huge_pages(const at::Tensor& fresh);

}  // namespace shardwright
