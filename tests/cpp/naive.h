// An oracle for layouts that shares no code with the library: it walks elements one by one, the way torch.chunk and
// nested sharding are defined.
#pragma once

#include <cstdint>
#include <vector>

namespace naive {

// Chunk `index` of `k` of a list, by torch.chunk.
inline std::vector<int64_t> chunk(const std::vector<int64_t>& list, int64_t k, int64_t index) {
  const auto n = static_cast<int64_t>(list.size());
  const int64_t size = n / k + (n % k != 0 ? 1 : 0);
  std::vector<int64_t> out;
  for (int64_t i = 0; i < n; ++i) {
    if (size > 0 && i / size == index) out.push_back(list[i]);
  }
  return out;
}

// DTensor's _StridedShard: chunk into split_factor pieces, take chunk `index` of each.
inline std::vector<int64_t> strided_chunk(const std::vector<int64_t>& list, int64_t split_factor, int64_t k,
                                          int64_t index) {
  std::vector<int64_t> out;
  for (int64_t piece = 0; piece < split_factor; ++piece) {
    for (const int64_t element : chunk(chunk(list, split_factor, piece), k, index)) out.push_back(element);
  }
  return out;
}

inline std::vector<int64_t> iota(int64_t n) {
  std::vector<int64_t> list(n);
  for (int64_t i = 0; i < n; ++i) list[i] = i;
  return list;
}

}  // namespace naive
