// The indices of a tensor dim that a rank holds, and their order: the geometry under every move.
//
// Invariant: an IntervalList is ascending and disjoint, and neighbouring intervals do not touch. So two lists are equal
// exactly if their sets of indices are. Cuts (cut_rule.h) split by *local* position, as nested sharding does, and keep
// the invariant.
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

// Appends an interval, which begins where the list ends or later. Empty ones are left out.
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

// Shifts the list so that it begins at 0. Lists that differ only by a shift become equal.
IntervalList moved_to_zero(IntervalList list);

// A run of indices that two lists share, with its local position in each.
struct Piece {
  int64_t length = 0;
  int64_t a_position = 0;
  int64_t b_position = 0;
};

// Returns the shared runs, ascending. Sender and receiver compute the same runs in the same order, so a packed message
// has the same meaning on both sides.
std::vector<Piece> intersect(const IntervalList& a, const IntervalList& b);

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
