#include "allocator.h"

#include <c10/core/alignment.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "driver.h"

namespace async_device {
namespace {

constexpr size_t kUnit = 512;

struct Block {
  void* data = nullptr;
  size_t bytes = 0;
  c10::StreamId stream = 0;
  const Graph* graph = nullptr;  // the graph whose pool it belongs to
  std::set<c10::StreamId> other_streams;
};

class CachingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, device()};
    const c10::Stream stream = current_stream();
    check_allowed(stream.device());
    const Graph* graph = capturing_graph(stream);
    if (graph == nullptr) forbid_in_capture("allocating on a stream that is not in the capture");
    const size_t rounded = (bytes + kUnit - 1) / kUnit * kUnit;
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (!is_capturing_anywhere()) take_back();
    Block* block = find({graph, stream.id()}, rounded);
    if (block == nullptr) {
      block = new Block{std::aligned_alloc(kUnit, rounded), rounded, stream.id(), graph, {}};
      std::memset(block->data, static_cast<int>(poison_), rounded);
    }
    allocated_ += static_cast<int64_t>(block->bytes);
    peak_ = std::max(peak_, allocated_);
    return {block->data, block, &CachingAllocator::release, device()};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &CachingAllocator::release; }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    enqueue(current_stream(), [=] { std::memcpy(dest, src, count); });
  }

  void record_use(const c10::DataPtr& data, c10::Stream stream) {
    if (data.get() == nullptr) return;
    const bool is_known = data.get_deleter() == &CachingAllocator::release;
    TORCH_CHECK(is_known || !refuses_unknown_, "async_device: a stream is recorded for memory that is not known");
    if (!is_known) return;
    auto* block = static_cast<Block*>(data.get_context());
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (stream.id() != block->stream) block->other_streams.insert(stream.id());
  }

  void refuse_unknown_memory(bool refuses) { CachingAllocator::get().refuse_unknown(refuses); }
  void empty_cache() {
    synchronize_device();
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    take_back();
    synchronize_device();  // poisons freed blocks
    for (auto& [key, blocks] : free_) {
      if (key.first != nullptr) continue;
      for (auto& [bytes, block] : blocks) {
        std::free(block->data);
        delete block;
      }
      blocks.clear();
    }
  }

  int64_t allocated() const { return allocated_; }
  int64_t peak() const { return peak_; }
  void reset_peak() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    peak_ = allocated_;
  }
  void set_poison(Poison poison) { poison_ = poison; }
  void refuse_unknown(bool refuses) { refuses_unknown_ = refuses; }

  static CachingAllocator& get() {
    static auto* instance = new CachingAllocator;  // outlives tensors that are freed at exit
    return *instance;
  }

 private:
  using Pool = std::pair<const Graph*, c10::StreamId>;

  static void release(void* context) { get().take(static_cast<Block*>(context)); }

  // Takes the smallest block that is large enough, if at most half of it stays unused.
  Block* find(const Pool& pool, size_t bytes) {
    std::multimap<size_t, Block*>& blocks = free_[pool];
    const auto found = blocks.lower_bound(bytes);
    if (found == blocks.end() || found->first > 2 * bytes) return nullptr;
    Block* block = found->second;
    blocks.erase(found);
    return block;
  }

  void take(Block* block) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    allocated_ -= static_cast<int64_t>(block->bytes);
    const bool is_captured = block->graph != nullptr;
    // Work that must not be captured is delayed to the end of the capture.
    if (!block->other_streams.empty() || (!is_captured && is_capturing_anywhere())) {
      Returning returning{block, {}};
      if (!is_capturing_anywhere()) returning.record();
      returning_.push_back(std::move(returning));
      return;
    }
    put_back(block);
  }

  void put_back(Block* block) {
    block->other_streams.clear();
    const bool may_poison = block->graph == nullptr || capturing_graph(stream_of(block->stream)) == block->graph;
    if (may_poison) {
      enqueue(stream_of(block->stream), [data = block->data, bytes = block->bytes, poison = poison_] {
        std::memset(data, static_cast<int>(poison), bytes);
      });
    }
    free_[{block->graph, block->stream}].emplace(block->bytes, block);
  }

  // Must not be called during a capture.
  void take_back() {
    std::vector<Returning> left;
    for (Returning& returning : returning_) {
      if (!returning.is_recorded) returning.record();
      const bool is_done = std::all_of(returning.events.begin(), returning.events.end(),
                                       [](const Event& event) { return event.query(); });
      if (is_done) {
        put_back(returning.block);
      } else {
        left.push_back(std::move(returning));
      }
    }
    returning_ = std::move(left);
  }

  struct Returning {
    Block* block = nullptr;
    std::vector<Event> events;
    bool is_recorded = false;

    void record() {
      is_recorded = true;
      for (const c10::StreamId id : block->other_streams) {
        events.emplace_back();
        events.back().record(stream_of(id));
      }
    }
  };

  std::recursive_mutex mutex_;
  std::map<Pool, std::multimap<size_t, Block*>> free_;
  std::vector<Returning> returning_;
  int64_t allocated_ = 0;
  int64_t peak_ = 0;
  Poison poison_ = Poison::kNan;
  std::atomic<bool> refuses_unknown_{false};
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    const size_t rounded = (bytes + kUnit - 1) / kUnit * kUnit;
    void* data = std::aligned_alloc(kUnit, rounded);
    std::memset(data, static_cast<int>(Poison::kNan), rounded);
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_[data] = static_cast<char*>(data) + bytes;
    return {data, data, &PinnedAllocator::release, c10::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::release; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { std::memcpy(dest, src, count); }

  bool has(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto after = ends_.upper_bound(const_cast<void*>(data));
    return after != ends_.begin() && data < std::prev(after)->second;
  }

  static PinnedAllocator& get() {
    static auto* instance = new PinnedAllocator;
    return *instance;
  }

 private:
  static void release(void* data) {
    {
      const std::lock_guard<std::mutex> lock(get().mutex_);
      get().ends_.erase(data);
    }
    std::free(data);
  }

  std::mutex mutex_;
  std::map<void*, void*> ends_;  // end addresses by begin address
};

}  // namespace

c10::Allocator* pinned_allocator() { return &PinnedAllocator::get(); }
bool is_pinned(const void* data) { return PinnedAllocator::get().has(data); }
void set_poison(Poison poison) { CachingAllocator::get().set_poison(poison); }
c10::Allocator* allocator() { return &CachingAllocator::get(); }
void record_stream(const c10::DataPtr& data, c10::Stream stream) { CachingAllocator::get().record_use(data, stream); }
void refuse_unknown_memory(bool refuses) { CachingAllocator::get().refuse_unknown(refuses); }
void empty_cache() { CachingAllocator::get().empty_cache(); }
int64_t allocated_bytes() { return CachingAllocator::get().allocated(); }
int64_t peak_allocated_bytes() { return CachingAllocator::get().peak(); }
void reset_peak() { CachingAllocator::get().reset_peak(); }

}  // namespace async_device
