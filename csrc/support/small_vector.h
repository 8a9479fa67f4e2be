// A vector that stores one item inline, without an allocation. Most interval lists have one interval.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace shardwright {

// Behaves like std::vector for trivially copyable items, except that a move also invalidates pointers to items.
template <typename T>
class SmallVector {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  SmallVector() = default;
  SmallVector(const SmallVector& other) { append(other.data(), other.size_); }
  SmallVector(SmallVector&& other) noexcept
      : one_(other.one_), many_(std::move(other.many_)), size_(other.size_), capacity_(other.capacity_) {
    other.reset();
  }
  SmallVector& operator=(const SmallVector& other) {
    if (this == &other) return *this;
    size_ = 0;
    append(other.data(), other.size_);
    return *this;
  }
  SmallVector& operator=(SmallVector&& other) noexcept {
    if (this == &other) return *this;
    one_ = other.one_;
    many_ = std::move(other.many_);
    size_ = other.size_;
    capacity_ = other.capacity_;
    other.reset();
    return *this;
  }
  ~SmallVector() = default;

  T* data() { return many_ ? many_.get() : &one_; }
  const T* data() const { return many_ ? many_.get() : &one_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return data()[i]; }
  const T& front() const { return data()[0]; }
  T& back() { return data()[size_ - 1]; }
  const T& back() const { return data()[size_ - 1]; }

  void push_back(T item) {  // a copy, because it may be an item of this vector
    if (size_ == capacity_) grow(2 * capacity_);
    data()[size_++] = item;
  }

  bool operator==(const SmallVector& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

 private:
  // Moves the items to an allocation of this capacity, which must be at least size().
  void grow(size_t capacity) {
    auto more = std::make_unique<T[]>(capacity);
    std::copy(begin(), end(), more.get());
    many_ = std::move(more);
    capacity_ = static_cast<uint32_t>(capacity);
  }
  void append(const T* items, size_t count) {
    if (size_ + count > capacity_) grow(size_ + count);
    std::copy(items, items + count, data() + size_);
    size_ += static_cast<uint32_t>(count);
  }
  // Makes this vector empty, after its items were moved to another vector.
  void reset() {
    size_ = 0;
    capacity_ = 1;
  }

  T one_{};                    // storage while many_ is null
  std::unique_ptr<T[]> many_;  // storage for more than one item
  uint32_t size_ = 0;
  uint32_t capacity_ = 1;
};

}  // namespace shardwright
