// Full tensors, their parts on ranks, and sums over axes, as references for simulated products.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "indices.h"
#include "layout/layout.h"
#include "simulate/machine.h"

namespace shardwright {

using Payload = Machine::Payload;

struct Dense {
  std::vector<int64_t> shape;
  Payload values;  // row-major

  int64_t flat_index(const std::vector<int64_t>& index) const {
    int64_t at = 0;
    for (size_t d = 0; d < shape.size(); ++d) at = at * shape[d] + index[d];
    return at;
  }
};

// Draws small integers, so that sums are exact in any order.
inline Dense random_dense(const std::vector<int64_t>& shape, std::mt19937& random) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  Dense made{shape, Payload(count)};
  for (double& value : made.values) value = std::uniform_int_distribution<int>(-4, 4)(random);
  return made;
}

inline Region whole(const std::vector<int64_t>& shape) {
  Region region;
  for (const int64_t size : shape) region.push_back({{0, size}});
  return region;
}

inline Payload part_of(const Dense& dense, const Layout& layout, int64_t position) {
  Payload values;
  for_each_index(layout.region(position),
                 [&](const auto& index) { values.push_back(dense.values[dense.flat_index(index)]); });
  return values;
}

// Returns the position of the first rank among those that differ only along dims with pending sums.
inline int64_t first_of_sum(const Layout& layout, int64_t position) {
  for (const int d : layout.partial_dims().to_vector()) {
    position -= layout.mesh().coordinate(position, d) * layout.mesh().stride(d);
  }
  return position;
}

// Returns the parts by position. Pending sums get random contributions.
inline std::vector<Payload> parts_of(const Dense& dense, const Layout& layout, std::mt19937& random) {
  std::vector<Payload> parts;
  for (int64_t p = 0; p < layout.mesh().size(); ++p) {
    parts.push_back(part_of(dense, layout, p));
    const int64_t first = first_of_sum(layout, p);
    for (size_t i = 0; first != p && i < parts[p].size(); ++i) {
      parts[p][i] = std::uniform_int_distribution<int>(-3, 3)(random);
      parts[first][i] -= parts[p][i];
    }
  }
  return parts;
}

inline void expect_parts(const std::vector<Payload>& parts, const Dense& dense, const Layout& layout) {
  std::map<int64_t, Payload> sums;
  for (int64_t p = 0; p < layout.mesh().size(); ++p) {
    Payload& sum = sums[first_of_sum(layout, p)];
    if (sum.empty()) sum.assign(parts[p].size(), 0);
    ASSERT_EQ(parts[p].size(), sum.size()) << layout.to_string();
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += parts[p][i];
  }
  for (const auto& [position, sum] : sums) {
    const Payload expected = part_of(dense, layout, position);
    for (size_t i = 0; i < sum.size(); ++i) {  // R -> P(sum) divides
      ASSERT_NEAR(sum[i], expected[i], 1e-9) << layout.to_string() << " at " << position << ", element " << i;
    }
  }
}

// Computes an einsum. The two tensors give the sizes of the letters.
inline Dense einsum(const std::string& a, const Dense& x, const std::string& b, const Dense& y,
                    const std::string& out) {
  std::map<char, int64_t> sizes;
  for (size_t d = 0; d < a.size(); ++d) sizes[a[d]] = x.shape[d];
  for (size_t d = 0; d < b.size(); ++d) sizes[b[d]] = y.shape[d];
  std::string letters;
  std::vector<int64_t> all;
  for (const auto& [letter, size] : sizes) {
    letters.push_back(letter);
    all.push_back(size);
  }
  const auto indexed = [&](const std::string& of, const std::vector<int64_t>& index) {
    std::vector<int64_t> picked;
    for (const char letter : of) picked.push_back(index[letters.find(letter)]);
    return picked;
  };
  Dense made;
  int64_t count = 1;
  for (const char letter : out) {
    made.shape.push_back(sizes[letter]);
    count *= sizes[letter];
  }
  made.values.assign(count, 0);
  for_each_index(whole(all), [&](const auto& index) {
    made.values[made.flat_index(indexed(out, index))] +=
        x.values[x.flat_index(indexed(a, index))] * y.values[y.flat_index(indexed(b, index))];
  });
  return made;
}

}  // namespace shardwright
