// Lists of the indices of a tensor dim that a rank holds, in the order of its local tensor: the geometry of all moves.
//
// Invariant: the intervals of an IntervalList are disjoint, and no interval begins where the one before it ends. So two
// lists are equal exactly if they have the same indices in the same order. Lists ascend, unless a rule of pieces
// (cut_rule.h) orders them otherwise. The *local position* of an index is its place in the list, and so in the local
// tensor: in [2, 4) [6, 8), index 6 is at local position 2. Cuts split by local position, as nested sharding does, and
// keep the invariant.
//
// Intervals that repeat at equal distances are stored once (repeating_list.h): every 8th of a million rows is [0, 1)
// with a count of 125,000 and a distance of 8. The functions below do not list repetitions (layout/periodic_runs.h).
// For lists with periods p and q, their time is proportional to the number of intervals within lcm(p, q), or in one of
// the lists if that number is lower. With one interval per repetition, this is O(sqrt(n)).
#pragma once

#include <cstdint>
#include <vector>

#include "layout/repeating_list.h"

namespace shardwright {

// The indices [begin, end) of a tensor dim. RepeatingList requires the functions (repeating_list.h).
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

// The items of a block with repetitions (RepeatingList::Block) must ascend, across repetitions too.
using IntervalList = RepeatingList<Interval>;
// True if both lists have the same indices in the same order, whichever repetitions they store.
bool operator==(const IntervalList& a, const IntervalList& b);

// One list per tensor dim. The part of a rank is the product of the lists.
using Region = std::vector<IntervalList>;

// Appends an interval. The list must not have any of its indices. Does nothing if the interval is empty.
inline void append(IntervalList& list, Interval interval) {
  if (interval.begin < interval.end) list.append(interval);
}

// Appends `count` intervals, each of which begins `period` after the one before it. Does nothing if the interval is
// empty or `count` is 0.
inline void append_repeated(IntervalList& list, Interval interval, int64_t period, int64_t count) {
  if (interval.begin < interval.end) list.append_repeated({&interval, 1}, period, count);
}

int64_t length(const IntervalList& list);             // the number of indices
int64_t num_elements(const Region& region);           // the product of the lengths; 1 without dims
std::vector<int64_t> shape_of(const Region& region);  // the lengths: the shape of the local tensor

// Returns the indices at local positions [begin, end) of the list. Positions that the list lacks are ignored.
IntervalList subrange(const IntervalList& list, int64_t begin, int64_t end);
// Returns the indices of `list` at the local positions `positions`, which ascend.
IntervalList at_positions(const IntervalList& list, const IntervalList& positions);

// True if no interval begins before the end of the interval before it.
bool is_ascending(const IntervalList& list);
// Returns the smallest interval that contains all indices of the list, or [0, 0) if the list is empty.
Interval span_of(const IntervalList& list);
// Returns the intervals sorted by `begin`.
std::vector<Interval> sorted_by_begin(std::vector<Interval> intervals);
std::vector<Interval> sorted_by_begin(const IntervalList& list);

// Returns the list with `by` added to every index.
IntervalList shifted(const IntervalList& list, int64_t by);
// Returns the list, shifted so that its first interval begins at 0. Lists that differ only by a shift become equal.
IntervalList moved_to_zero(const IntervalList& list);

// A run of indices that two lists a and b share, as its length and its first local position in each list.
struct Piece {
  int64_t length = 0;
  int64_t a_position = 0;
  int64_t b_position = 0;
  bool operator==(const Piece&) const = default;

  // The distance between repetitions of a piece, in local positions of each list.
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

// Returns the indices that two ascending lists share.
IntervalList shared_indices(const IntervalList& a, const IntervalList& b);

// Returns the runs of indices that two lists share, in the order of b. Runs that are adjacent in both lists are merged.
// Sender and receiver compute the same runs in the same order, so a packed message has the same meaning on both sides.
PieceList intersect(const IntervalList& a, const IntervalList& b);
// Returns the runs of the indices in `only`, in the order of b. `only` is an ascending list whose indices are all in a
// and in b. If a or b does not ascend, the time is proportional to the number of all intervals.
PieceList intersect(const IntervalList& a, const IntervalList& b, const IntervalList& only);

int64_t length(const PieceList& pieces);  // the number of shared indices
// Returns the pieces of the shared indices [begin, end), counted in the order of b. Cuts the first and last piece if
// needed.
PieceList subrange(const PieceList& pieces, int64_t begin, int64_t end);

// A summary of intersect(a, b); all numbers are 0 if the lists share nothing.
struct SharedRuns {
  int64_t length = 0;      // shared indices
  int64_t runs = 0;        // pieces
  int64_t a_position = 0;  // local position of the first piece in a
  int64_t b_position = 0;  // local position of the first piece in b
};
// Returns the summary of intersect(a, b).
SharedRuns shared_runs(const IntervalList& a, const IntervalList& b);
// Returns the number of indices that two lists share.
int64_t intersection_length(const IntervalList& a, const IntervalList& b);
// Returns the number of elements that two regions of one tensor share.
int64_t shared_elements(const Region& a, const Region& b);

}  // namespace shardwright
