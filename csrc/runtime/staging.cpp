#include "runtime/staging.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

namespace shardwright {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
// Minimum size of tensors for which huge pages are requested.
constexpr size_t kHugeTensorBytes = 4 * kHugePageBytes;

// The cached blocks of memory. A request gets the smallest block that is large enough, unless that block is more than
// twice as large as requested.
class StagingCache {
 public:
  // Removes a block for a request of this size and returns it; null if none fits.
  c10::Storage take(int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.lower_bound(bytes);
    if (found == blocks_.end() || found->first > 2 * bytes) return {};
    c10::Storage taken = std::move(found->second);
    total_bytes_ -= found->first;
    blocks_.erase(found);
    return taken;
  }

  // Adds a block of at most kMaxCachedBytes. Frees the smallest blocks if the cache would exceed that size.
  void put(c10::Storage block) {
    const auto size = static_cast<int64_t>(block.nbytes());
    const std::lock_guard<std::mutex> lock(mutex_);
    while (total_bytes_ + size > kMaxCachedBytes) {
      total_bytes_ -= blocks_.begin()->first;
      blocks_.erase(blocks_.begin());
    }
    blocks_.emplace(size, std::move(block));
    total_bytes_ += size;
  }

  int64_t total_bytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return total_bytes_;
  }

  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.clear();
    total_bytes_ = 0;
  }

 private:
  mutable std::mutex mutex_;
  std::multimap<int64_t, c10::Storage> blocks_;  // by size in bytes
  int64_t total_bytes_ = 0;
};

// The cache of this process.
StagingCache& staging_cache() {
  static StagingCache* instance = new StagingCache;  // never destroyed: threads may still run at exit
  return *instance;
}

}  // namespace

at::Tensor allocate_staging(int64_t count, const at::TensorOptions& options) {
  const int64_t bytes = count * static_cast<int64_t>(options.dtype().itemsize());
  if (!options.device().is_cpu()) return at::empty({count}, options);
  if (bytes < kMinCachedBytes) return at::detail::empty_cpu({count}, options);
  c10::Storage block = staging_cache().take(bytes);
  if (block) return at::empty({0}, options).set_(std::move(block), 0, {count}, {1});
  at::Tensor fresh = at::empty({count}, options);
  prefer_huge_pages(fresh);
  return fresh;
}

void return_staging(const at::Tensor& staging) {
  if (!staging.defined() || !staging.device().is_cpu()) return;
  const auto bytes = static_cast<int64_t>(staging.storage().nbytes());
  if (bytes >= kMinCachedBytes && bytes <= kMaxCachedBytes) staging_cache().put(staging.storage());
}

int64_t cached_staging_bytes() { return staging_cache().total_bytes(); }

void release_staging() { staging_cache().clear(); }

void prefer_huge_pages(const at::Tensor& fresh) {
#ifdef MADV_HUGEPAGE
  if (!fresh.device().is_cpu() || fresh.nbytes() < kHugeTensorBytes) return;
  const auto begin = reinterpret_cast<uintptr_t>(fresh.data_ptr());
  const uintptr_t first = (begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uintptr_t last = (begin + fresh.nbytes()) / kHugePageBytes * kHugePageBytes;
  // This is a hint; if it is refused, the pages stay small.
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace shardwright
