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

// The cached blocks of memory, by size. A request takes the smallest block that is large enough, unless the block is
// more than twice as large.
class StagingCache {
 public:
  // Removes a block for a request and returns it; null if none fits.
  c10::Storage take(int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = kept_.lower_bound(bytes);
    if (found == kept_.end() || found->first > 2 * bytes) return {};
    c10::Storage taken = std::move(found->second);
    total_ -= found->first;
    kept_.erase(found);
    return taken;
  }

  // Adds a block. Makes room by freeing the smallest blocks.
  void give(c10::Storage storage) {
    const auto size = static_cast<int64_t>(storage.nbytes());
    const std::lock_guard<std::mutex> lock(mutex_);
    while (total_ + size > kMaxKeptBytes) {
      total_ -= kept_.begin()->first;
      kept_.erase(kept_.begin());
    }
    kept_.emplace(size, std::move(storage));
    total_ += size;
  }

  int64_t total() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return total_;
  }

  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.clear();
    total_ = 0;
  }

 private:
  mutable std::mutex mutex_;
  std::multimap<int64_t, c10::Storage> kept_;
  int64_t total_ = 0;
};

// The cache of this process.
StagingCache& staging_cache() {
  static StagingCache* instance = new StagingCache;  // never destroyed: threads may still run at exit
  return *instance;
}

}  // namespace

at::Tensor take_staging(int64_t count, const at::TensorOptions& options) {
  const int64_t bytes = count * static_cast<int64_t>(options.dtype().itemsize());
  if (!options.device().is_cpu()) return at::empty({count}, options);
  if (bytes < kMinKeptBytes) return at::detail::empty_cpu({count}, options);
  c10::Storage kept = staging_cache().take(bytes);
  if (kept) return at::empty({0}, options).set_(std::move(kept), 0, {count}, {1});
  at::Tensor fresh = at::empty({count}, options);
  prefer_huge_pages(fresh);
  return fresh;
}

void give_staging(const at::Tensor& staging) {
  if (!staging.defined() || !staging.device().is_cpu()) return;
  const auto bytes = static_cast<int64_t>(staging.storage().nbytes());
  if (bytes >= kMinKeptBytes && bytes <= kMaxKeptBytes) staging_cache().give(staging.storage());
}

int64_t kept_staging_bytes() { return staging_cache().total(); }

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
