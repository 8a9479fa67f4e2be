// The indices of a tensor dim that a rank holds, and their order: the geometry under every move.
//
// Invariant: an IntervalList is disjoint, and no interval begins where the one before it ends. So two lists are equal
// exactly if they have the same indices in the same order. The order is that of the local tensor. Lists ascend, unless
// a rule of pieces (cut_rule.h) orders them otherwise. Cuts split by *local* position, as nested sharding does, and
// keep the invariant.
#pragma once

#include <cstdint>
#include <vector>

namespace shardwright {

struct Interval {
  int64_t begin = 0;
  int64_t end = 0;  // exclusive
  bool operator==(const Interval&) const = default;
};

using IntervalList = std::vector<Interval>;

// One list per tensor dim; the rank's part is their product.
using Region = std::vector<IntervalList>;

// Appends an interval to the end of a list, which has none of its indices. Empty intervals are left out.
inline void append(IntervalList& list, Interval interval) {
  if (interval.begin >= interval.end) return;
  if (!list.empty() && list.back().end == interval.begin) {
    list.back().end = interval.end;
  } else {
    list.push_back(interval);
  }
}

int64_t length(const IntervalList& list);
int64_t num_elements(const Region& region);
std::vector<int64_t> shape_of(const Region& region);

// Returns the indices at local positions [begin, end) of the list.
IntervalList subrange(const IntervalList& list, int64_t begin, int64_t end);

// Takes ascending subranges of a list in one pass over it. This matters if there are as many subranges as intervals.
class Subranges {
 public:
  explicit Subranges(const IntervalList& list) : at_(list.begin()), end_(list.end()) {}

  // Appends the indices at local positions [begin, end). `begin` must not be less than in earlier calls.
  void append_to(IntervalList& out, int64_t begin, int64_t end);

 private:
  IntervalList::const_iterator at_;
  IntervalList::const_iterator end_;
  int64_t position_ = 0;  // the local position of *at_
};

bool is_ascending(const IntervalList& list);
// Returns the least interval with all indices of the list; [0, 0) if it is empty.
Interval span_of(const IntervalList& list);
// Returns the intervals by ascending beginnings.
IntervalList sorted_by_place(IntervalList list);

// Shifts the list so that it begins at 0. Lists that differ only by a shift become equal.
IntervalList moved_to_zero(IntervalList list);

// A run of local positions that are the same indices in two lists, with where it begins in each.
struct Piece {
  int64_t length = 0;
  int64_t a_position = 0;
  int64_t b_position = 0;
};

// Returns the shared runs in the order of b, those that follow each other in both lists as one. Sender and receiver
// compute the same runs in the same order, so a packed message has the same meaning on both sides.
std::vector<Piece> intersect(const IntervalList& a, const IntervalList& b);
// The same for the indices of an ascending list `only`, all of which both lists have.
std::vector<Piece> intersect(const IntervalList& a, const IntervalList& b, const IntervalList& only);

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
// Returns the indices of two ascending lists that both have.
IntervalList in_common(const IntervalList& a, const IntervalList& b);
int64_t shared_elements(const Region& a, const Region& b);

}  // namespace shardwright
