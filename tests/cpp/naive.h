// An oracle for layouts that shares no code with the library. It walks over single elements, as torch.chunk and nested
// sharding are defined.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace naive {

// Returns chunk `index` of `k` of a list, as torch.chunk does.
inline std::vector<int64_t> chunk(const std::vector<int64_t>& list, int64_t k, int64_t index) {
  const auto n = static_cast<int64_t>(list.size());
  const int64_t size = n / k + (n % k != 0 ? 1 : 0);
  std::vector<int64_t> out;
  for (int64_t i = 0; i < n; ++i) {
    if (size > 0 && i / size == index) out.push_back(list[i]);
  }
  return out;
}

// DTensor's _StridedShard: chunks the list into split_factor pieces, and takes chunk `index` of each.
inline std::vector<int64_t> strided_chunk(const std::vector<int64_t>& list, int64_t split_factor, int64_t k,
                                          int64_t index) {
  std::vector<int64_t> out;
  for (int64_t piece = 0; piece < split_factor; ++piece) {
    for (const int64_t element : chunk(chunk(list, split_factor, piece), k, index)) out.push_back(element);
  }
  return out;
}

// Returns the part of a coordinate if parts have these sizes, in order.
inline std::vector<int64_t> ragged(const std::vector<int64_t>& list, const std::vector<int64_t>& sizes, int64_t index) {
  std::vector<int64_t> out;
  size_t at = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    for (int64_t taken = 0; taken < sizes[i]; ++taken, ++at) {
      if (static_cast<int64_t>(i) == index) out.push_back(list.at(at));
    }
  }
  return out;
}

// Cuts a list in whole blocks: numbers the blocks, and chunks the numbers as torch.chunk does.
inline std::vector<int64_t> blocks(const std::vector<int64_t>& list, int64_t block, int64_t k, int64_t index) {
  std::vector<int64_t> numbers;
  for (size_t i = 0; i < list.size(); i += block) numbers.push_back(static_cast<int64_t>(i) / block);
  std::vector<int64_t> out;
  for (const int64_t number : chunk(numbers, k, index)) {
    for (int64_t i = number * block; i < (number + 1) * block && i < static_cast<int64_t>(list.size()); ++i) {
      out.push_back(list[i]);
    }
  }
  return out;
}

// Several components in one list. Each is cut by itself, in whole units.
inline std::vector<int64_t> packed(const std::vector<int64_t>& list, const std::vector<int64_t>& sizes, int64_t k,
                                   int64_t index, int64_t unit = 1) {
  std::vector<int64_t> out;
  for (size_t i = 0; i < sizes.size(); ++i) {
    for (const int64_t element : blocks(ragged(list, sizes, static_cast<int64_t>(i)), unit, k, index)) {
      out.push_back(element);
    }
  }
  return out;
}

// Pieces from text such as "0-2+5-8:2-5", which lists the intervals of each coordinate.
inline std::vector<int64_t> pieces(const std::vector<int64_t>& list, const std::string& text, int64_t index) {
  std::vector<int64_t> out;
  int64_t at = 0;
  int64_t number = 0;
  int64_t begin = -1;
  for (const char c : text) {
    if (c >= '0' && c <= '9') {
      number = number * 10 + (c - '0');
      continue;
    }
    if (c == '-') {
      begin = number;
    } else if (begin >= 0) {
      for (int64_t i = begin; i < number && at == index; ++i) out.push_back(list.at(i));
      begin = -1;
    }
    at += c == ':' ? 1 : 0;
    number = 0;
  }
  return out;
}

inline std::vector<int64_t> cyclic(const std::vector<int64_t>& list, int64_t block, int64_t k, int64_t index) {
  std::vector<int64_t> out;
  for (size_t i = 0; i < list.size(); ++i) {
    if (static_cast<int64_t>(i) / block % k == index) out.push_back(list[i]);
  }
  return out;
}

inline std::vector<int64_t> iota(int64_t n) {
  std::vector<int64_t> list(n);
  for (int64_t i = 0; i < n; ++i) list[i] = i;
  return list;
}

}  // namespace naive
