// Random pieces on random meshes. Several coordinates may have an element, in any order.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "layouts.h"
#include "support/error.h"

namespace shardwright::test {

class RandomPieces {
 public:
  explicit RandomPieces(unsigned seed, int64_t longest = 4) : random_(seed), longest_(longest) {}

  int64_t pick(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random_); }

  // Returns the text of pieces of `n` rows for `k` coordinates. Each row has at least one coordinate.
  std::string pieces(int64_t n, int64_t k) {
    std::vector<std::string> lists(k);
    std::vector<Interval> cut;
    for (int64_t at = 0; at < n;) {
      const int64_t end = std::min(n, at + pick(1, longest_));
      cut.push_back({at, end});
      at = end;
    }
    std::shuffle(cut.begin(), cut.end(), random_);
    for (const Interval& one : cut) {
      const int64_t owner = pick(0, k - 1);
      for (int64_t c = 0; c < k; ++c) {
        if (c == owner || pick(0, 3) == 0) lists[c] += concat(lists[c].empty() ? "" : "+", one.begin, "-", one.end);
      }
    }
    return concat("Pieces(0,", join(lists, ":"), ")");
  }

  // Returns pieces of [n, columns] on 2 to 8 of ranks 0 to 10, alone or with another cut.
  Layout layout(int64_t n) {
    const std::vector<std::string> others{"R", "S(1)", "S(0)", "Cyclic(0,2)"};
    return layout(n, pick(1, 2), others[pick(0, 3)]);
  }
  Layout layout(int64_t n, int64_t other, const std::string& cut, int64_t columns = 2,
                const std::string& dtype = "float32") {
    const int64_t k = pick(2, 4);
    std::vector<int64_t> ranks(k * other);
    const int64_t first = pick(0, 3);
    for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = first + static_cast<int64_t>(i);
    std::shuffle(ranks.begin(), ranks.end(), random_);
    return layout_of(mesh_of({k, other}, ranks), {n, columns}, concat(pieces(n, k), ",", cut), {}, dtype);
  }

 private:
  std::mt19937 random_;
  int64_t longest_;  // maximum length of a piece
};

}  // namespace shardwright::test
