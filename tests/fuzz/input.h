// Choices read from the bytes of one input of a fuzzer. Missing bytes read as zeros, so every input gives a case, and a
// short input gives a simple one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace shardwright::fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  // low <= result <= high. Consumes only as many bytes as the range needs.
  int64_t between(int64_t low, int64_t high) {
    const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    uint64_t value = 0;
    for (uint64_t left = range; left > 0; left >>= 8) value = value << 8 | byte();
    if (range != UINT64_MAX) value %= range + 1;
    return static_cast<int64_t>(static_cast<uint64_t>(low) + value);
  }

  size_t below(size_t count) { return static_cast<size_t>(between(0, static_cast<int64_t>(count) - 1)); }
  bool one_in(int64_t n) { return between(1, n) == n; }

  template <typename T>
  T one_of(const std::vector<T>& choices) {
    return choices[below(choices.size())];
  }

  std::string bytes(size_t count) {
    std::string out;
    while (out.size() < count && at_ != end_) out.push_back(static_cast<char>(byte()));
    return out;
  }

 private:
  uint8_t byte() { return at_ == end_ ? 0 : *at_++; }

  const uint8_t* at_;
  const uint8_t* end_;
};

}  // namespace shardwright::fuzz
