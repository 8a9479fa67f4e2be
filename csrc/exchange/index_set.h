// A set of small indices, one bit each: ranks of a list, members of a group.
#pragma once

#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace shardwright {

// A subset of the indices [0, n). Sets that are combined or compared must have the same n.
class IndexSet {
 public:
  // Return the empty set, and the set of all indices in [0, n).
  static IndexSet none_of(size_t n) { return IndexSet(std::vector<uint64_t>((n + 63) / 64, 0)); }
  static IndexSet all_of(size_t n) {
    IndexSet all(std::vector<uint64_t>((n + 63) / 64, ~uint64_t{0}));
    if (n % 64 > 0) all.words_.back() = (uint64_t{1} << n % 64) - 1;
    return all;
  }

  void insert(size_t i) { words_[i / 64] |= uint64_t{1} << i % 64; }
  void erase(size_t i) { words_[i / 64] &= ~(uint64_t{1} << i % 64); }
  // Replace this set by its union, intersection or difference with another set.
  void unite(const IndexSet& other) {
    for (size_t w = 0; w < words_.size(); ++w) words_[w] |= other.words_[w];
  }
  void intersect(const IndexSet& other) {
    for (size_t w = 0; w < words_.size(); ++w) words_[w] &= other.words_[w];
  }
  void subtract(const IndexSet& other) {
    for (size_t w = 0; w < words_.size(); ++w) words_[w] &= ~other.words_[w];
  }

  int64_t size() const {
    int64_t size = 0;
    for (const uint64_t word : words_) size += std::popcount(word);
    return size;
  }
  // Calls visit(index) for each index, in ascending order.
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (size_t w = 0; w < words_.size(); ++w) {
      for (uint64_t left = words_[w]; left != 0; left &= left - 1) {
        visit(64 * w + static_cast<size_t>(std::countr_zero(left)));
      }
    }
  }
  std::vector<size_t> indices() const {  // ascending
    std::vector<size_t> all;
    for_each([&](size_t i) { all.push_back(i); });
    return all;
  }
  auto operator<=>(const IndexSet&) const = default;

 private:
  explicit IndexSet(std::vector<uint64_t> words) : words_(std::move(words)) {}

  std::vector<uint64_t> words_;
};

}  // namespace shardwright
