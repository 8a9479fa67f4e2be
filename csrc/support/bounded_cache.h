// A bounded cache that drops the least recently used entry first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace shardwright {

// Thread-safe. Values are made outside the lock. If two threads miss the same key at the same time, both make a value,
// and both get the value that was stored first, unless is_good() rejects it.
template <typename Key, typename Value, typename Hash = std::hash<Key>>
class BoundedCache {
 public:
  // `capacity` is the maximum number of entries; 0 acts as 1.
  explicit BoundedCache(size_t capacity) : capacity_(capacity) {}

  // The numbers of hits and misses since the last reset, and of entries now.
  struct Counts {
    int64_t hits = 0;
    int64_t misses = 0;
    int64_t size = 0;
  };

  // Returns the cached value for `key` if `is_good(value)` is true. Otherwise calls `make()`, stores its value and
  // returns it, which counts as a miss. If `make` throws, nothing is stored and the exception is passed on.
  template <typename Make, typename IsGood>
  Value get_or_make(const Key& key, Make&& make, IsGood&& is_good) {
    std::optional<Value> found = find(key);
    if (found && is_good(*found)) return *std::move(found);
    Value value = make();
    const std::lock_guard lock(mutex_);
    counts_.hits -= found.has_value();  // find() counted a hit, but the value is not good
    ++counts_.misses;
    if (const auto raced = entries_.find(&key); raced != entries_.end()) {
      if (!is_good(raced->second->second)) raced->second->second = value;
      return raced->second->second;
    }
    while (!recent_first_.empty() && recent_first_.size() >= capacity_) {
      entries_.erase(&recent_first_.back().first);
      recent_first_.pop_back();
    }
    recent_first_.emplace_front(key, value);
    entries_.emplace(&recent_first_.front().first, recent_first_.begin());
    return value;
  }
  // As above, with an is_good() that accepts every value.
  template <typename Make>
  Value get_or_make(const Key& key, Make&& make) {
    return get_or_make(key, std::forward<Make>(make), [](const Value&) { return true; });
  }

  Counts counts() const {
    const std::lock_guard lock(mutex_);
    Counts counts = counts_;
    counts.size = static_cast<int64_t>(recent_first_.size());
    return counts;
  }

  // Sets the numbers of hits and misses to 0. Keeps the entries.
  void reset_counts() {
    const std::lock_guard lock(mutex_);
    counts_ = {};
  }

  // Removes all entries. Keeps the numbers of hits and misses.
  void clear() {
    const std::lock_guard lock(mutex_);
    entries_.clear();
    recent_first_.clear();
  }

 private:
  // The map's keys are pointers to the keys in the list, so that each key is stored once.
  struct PointeeHash {
    size_t operator()(const Key* key) const { return Hash()(*key); }
  };
  struct PointeeEqual {
    bool operator()(const Key* a, const Key* b) const { return *a == *b; }
  };
  using Entry = std::pair<const Key, Value>;

  // Returns the value for a key, or nullopt. A found entry becomes the most recently used one and counts as a hit.
  std::optional<Value> find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(&key);
    if (found == entries_.end()) return std::nullopt;
    recent_first_.splice(recent_first_.begin(), recent_first_, found->second);
    ++counts_.hits;
    return found->second->second;
  }

  const size_t capacity_;
  mutable std::mutex mutex_;
  std::list<Entry> recent_first_;  // the most recently used entry first
  std::unordered_map<const Key*, typename std::list<Entry>::iterator, PointeeHash, PointeeEqual> entries_;
  Counts counts_;
};

}  // namespace shardwright
