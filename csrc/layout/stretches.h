// Meets lists whose intervals repeat, without listing all repetitions.
//
// Each list is seen as a map from keys to values: from indices to local positions to find what two lists share, from
// local positions to indices to find what lies at some positions. A map is a sequence of *stretches*: runs of keys that
// repeat `count` times. Where a stretch with period p meets one with period q, there are three ways:
//
//   in common periods   What lies within lcm(p, q) keys repeats, with a rest at the end.
//   run by run          Within one run of one stretch, the other one repeats, with a rest at either end.
//   listed              Both are listed and merged.
//
// The way that visits the fewest runs is taken. For n keys and one run per repetition this is at most about 2 sqrt(n)
// runs: if p or q is at least sqrt(n), that stretch has at most sqrt(n) runs, and otherwise there are at most p + q
// runs within lcm(p, q).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "layout/region.h"

namespace shardwright {

// Consecutive keys with consecutive values.
struct KeyRun {
  int64_t key = 0;
  int64_t length = 0;
  int64_t value = 0;
};

// Calls visit(piece) for the keys that two sequences of runs at ascending keys share. Its positions are their values.
template <typename Visit>
void for_each_shared_key_run(const std::vector<KeyRun>& a, const std::vector<KeyRun>& b, const Visit& visit) {
  for (auto i = a.begin(), j = b.begin(); i != a.end() && j != b.end();) {
    const int64_t begin = std::max(i->key, j->key);
    const int64_t end = std::min(i->key + i->length, j->key + j->length);
    if (begin < end) visit(Piece{end - begin, i->value + begin - i->key, j->value + begin - j->key});
    i->key + i->length <= j->key + j->length ? void(++i) : void(++j);
  }
}

// Runs that repeat, at ascending keys. All keys of a repetition lie within one period.
struct Stretch {
  std::vector<KeyRun> runs;  // of the first repetition
  int64_t num_keys = 0;      // that these have
  int64_t count = 1;
  int64_t key_period = 0;  // if it repeats
  int64_t value_period = 0;

  int64_t begin() const { return runs.front().key; }
  int64_t end() const { return runs.back().key + runs.back().length + (count - 1) * key_period; }
};

// The stretches of an ascending list, from indices to local positions.
std::vector<Stretch> positions_by_index(const IntervalList& list);
// The stretches of any list, from local positions to indices.
std::vector<Stretch> indices_by_position(const IntervalList& list);

// Returns the runs of keys that are in both maps, by ascending keys. Their positions are the values.
PieceList meet(const std::vector<Stretch>& a, const std::vector<Stretch>& b);

}  // namespace shardwright
