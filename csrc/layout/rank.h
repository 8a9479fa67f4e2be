// Ranks and positions: the two numbers of a process, with types that cannot be confused.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

namespace shardwright {

// A global rank, as in process groups. It does not convert to or from integers implicitly: use Rank{3} and
// to_int(rank).
enum class Rank : int64_t {};

constexpr int64_t to_int(Rank rank) { return static_cast<int64_t>(rank); }

inline std::ostream& operator<<(std::ostream& out, Rank rank) { return out << to_int(rank); }

// Returns ranks as integers, for Python and for files.
inline std::vector<int64_t> to_ints(const std::vector<Rank>& ranks) {
  std::vector<int64_t> all;
  all.reserve(ranks.size());
  for (const Rank rank : ranks) all.push_back(to_int(rank));
  return all;
}

// The row-major index of a rank on one mesh. Geometry computes with it, so it converts to an integer implicitly, but an
// integer does not convert to it.
enum Position : int64_t {};

}  // namespace shardwright
