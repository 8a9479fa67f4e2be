// Intersects lists with repetitions, without listing all repetitions.
//
// A list is viewed as a map from keys to values: from indices to local positions, to intersect two lists, or from local
// positions to indices, to find the indices at some positions. A map is a sequence of repeating ranges (PeriodicRuns):
// runs of keys that repeat `count` times. Two overlapping ranges with periods p and q are intersected by one of three
// methods:
//
//   in common periods   The overlap within lcm(p, q) keys repeats. The remainder is merged.
//   run by run          Within one run of one range, the other range repeats. Both ends are listed.
//   listed              The runs of both ranges are listed and merged.
//
// The method that visits the fewest runs is taken. For n keys and one run per repetition these are at most about 2
// sqrt(n) runs: if p or q is at least sqrt(n), that range has at most sqrt(n) runs, and otherwise there are at most p +
// q runs within lcm(p, q).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "layout/region.h"

namespace shardwright {

// Consecutive keys with consecutive values.
struct KeyRun {
  int64_t key = 0;     // the first key
  int64_t length = 0;  // number of keys
  int64_t value = 0;   // value of the first key
};

// Calls visit(piece) for each run of keys that two sequences with ascending keys share. The piece's a_position and
// b_position are the values of the run's first key in a and in b.
template <typename Visit>
void for_each_shared_key_run(const std::vector<KeyRun>& a, const std::vector<KeyRun>& b, const Visit& visit) {
  for (auto i = a.begin(), j = b.begin(); i != a.end() && j != b.end();) {
    const int64_t begin = std::max(i->key, j->key);
    const int64_t end = std::min(i->key + i->length, j->key + j->length);
    if (begin < end) visit(Piece{end - begin, i->value + begin - i->key, j->value + begin - j->key});
    i->key + i->length <= j->key + j->length ? void(++i) : void(++j);
  }
}

// A repeating range: runs with ascending keys that repeat. All keys of a repetition are within one period.
struct PeriodicRuns {
  std::vector<KeyRun> runs;  // of the first repetition
  int64_t num_keys = 0;      // of these runs together
  int64_t count = 1;         // number of repetitions
  int64_t key_period = 0;    // added to keys in each repetition; unused if count is 1
  int64_t value_period = 0;  // added to values in each repetition; unused if count is 1

  // All keys are in [begin(), end()).
  int64_t begin() const { return runs.front().key; }
  int64_t end() const { return runs.back().key + runs.back().length + (count - 1) * key_period; }
};

// Returns the map from indices to local positions of an ascending list.
std::vector<PeriodicRuns> positions_by_index(const IntervalList& list);
// Returns the map from local positions to indices of any list.
std::vector<PeriodicRuns> indices_by_position(const IntervalList& list);

// Returns the runs of keys that are in both maps, by ascending keys. A piece's a_position and b_position are the values
// of its first key in map a and in map b.
PieceList intersect(const std::vector<PeriodicRuns>& a, const std::vector<PeriodicRuns>& b);

}  // namespace shardwright
