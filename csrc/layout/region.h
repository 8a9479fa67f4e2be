// The indices of a tensor dim that a rank holds, and their order: the geometry under every move.
//
// Invariant: an IntervalList is disjoint, and no interval begins where the one before it ends. So two lists are equal
// exactly if they have the same indices in the same order. The order is that of the local tensor. Lists ascend, unless
// a rule of pieces (cut_rule.h) orders them otherwise. Cuts split by *local* position, as nested sharding does, and
// keep the invariant.
//
// Intervals that repeat at equal distances are kept once (repeating_list.h): every 8th of a million rows is [0, 1), a
// hundred thousand times, 8 further each time. The functions below work on repetitions as such (layout/stretches.h).
// For lists that repeat after p and q indices they take time in proportion to what lies within the least common
// multiple of p and q, or to the intervals of one list, whichever is less: at most in proportion to the square root of
// n where each repetition has one interval.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/repeating_list.h"

namespace shardwright {

struct Interval {
  int64_t begin = 0;
  int64_t end = 0;  // exclusive
  bool operator==(const Interval&) const = default;

  using Shift = int64_t;
  int64_t extent() const { return end - begin; }
  bool is_followed_by(const Interval& next) const { return end == next.begin; }
  void lengthen(int64_t by) { end += by; }
  Interval part(int64_t from, int64_t to) const { return {begin + from, begin + to}; }
  Interval shifted(int64_t by) const { return {begin + by, end + by}; }
};

// Blocks that repeat ascend.
using IntervalList = RepeatingList<Interval>;
bool operator==(const IntervalList& a, const IntervalList& b);

// One list per tensor dim; the rank's part is their product.
using Region = std::vector<IntervalList>;

// Appends an interval to the end of a list, which has none of its indices. Empty intervals are left out.
inline void append(IntervalList& list, Interval interval) {
  if (interval.begin < interval.end) list.append(interval);
}

// Appends `count` intervals, each of which begins `period` after the one before it.
inline void append_repeated(IntervalList& list, Interval interval, int64_t period, int64_t count) {
  if (interval.begin < interval.end) list.append_repeated({&interval, 1}, period, count);
}

int64_t length(const IntervalList& list);
int64_t num_elements(const Region& region);
std::vector<int64_t> shape_of(const Region& region);

// Returns the indices at local positions [begin, end) of the list.
IntervalList subrange(const IntervalList& list, int64_t begin, int64_t end);
// Returns the indices at some local positions of the list, which ascend.
IntervalList at_positions(const IntervalList& list, const IntervalList& positions);

bool is_ascending(const IntervalList& list);
// Returns the least interval with all indices of the list; [0, 0) if it is empty.
Interval span_of(const IntervalList& list);
// Returns the intervals by ascending beginnings.
std::vector<Interval> sorted_by_place(std::vector<Interval> intervals);
std::vector<Interval> sorted_by_place(const IntervalList& list);

IntervalList shifted(const IntervalList& list, int64_t by);
// Shifts the list so that it begins at 0. Lists that differ only by a shift become equal.
IntervalList moved_to_zero(const IntervalList& list);

// A run of local positions that are the same indices in two lists, with where it begins in each.
struct Piece {
  int64_t length = 0;
  int64_t a_position = 0;
  int64_t b_position = 0;
  bool operator==(const Piece&) const = default;

  struct Shift {
    int64_t a = 0;
    int64_t b = 0;
    Shift operator*(int64_t times) const { return {a * times, b * times}; }
    bool operator==(const Shift&) const = default;
  };
  int64_t extent() const { return length; }
  bool is_followed_by(const Piece& next) const {
    return a_position + length == next.a_position && b_position + length == next.b_position;
  }
  void lengthen(int64_t by) { length += by; }
  Piece part(int64_t from, int64_t to) const { return {to - from, a_position + from, b_position + from}; }
  Piece shifted(const Shift& by) const { return {length, a_position + by.a, b_position + by.b}; }
};

using PieceList = RepeatingList<Piece>;

// Returns the indices that are in both of two ascending lists.
IntervalList shared_indices(const IntervalList& a, const IntervalList& b);

// Returns the shared runs in the order of b, those that follow each other in both lists as one. Sender and receiver
// compute the same runs in the same order, so a packed message has the same meaning on both sides.
PieceList intersect(const IntervalList& a, const IntervalList& b);
// The same for the indices of an ascending list `only`, all of which both lists have. Takes time in proportion to all
// intervals if one of the lists does not ascend.
PieceList intersect(const IntervalList& a, const IntervalList& b, const IntervalList& only);

int64_t length(const PieceList& pieces);
// Returns the pieces [begin, end), counted in indices of the order of b; the first and the last may be parts of pieces.
PieceList subrange(const PieceList& pieces, int64_t begin, int64_t end);

// A summary of the runs that two lists share: the total number of indices, the number of runs, and the local position
// of the first one in each list.
struct SharedRuns {
  int64_t length = 0;
  int64_t runs = 0;
  int64_t a_position = 0;
  int64_t b_position = 0;
};
SharedRuns shared_runs(const IntervalList& a, const IntervalList& b);
int64_t intersection_length(const IntervalList& a, const IntervalList& b);
int64_t shared_elements(const Region& a, const Region& b);

}  // namespace shardwright
