// Which indices of one tensor dim a rank holds, and in which order: the geometry under every move.
//
// An IntervalList is ascending and disjoint, and neighbouring intervals do not touch. So two lists are equal exactly
// when their sets of indices are. Cutting (cut_rule.h) goes by *local* position, as nested sharding does, and keeps
// these properties.
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

int64_t length(const IntervalList& list);
int64_t num_elements(const Region& region);
std::vector<int64_t> shape_of(const Region& region);

// The indices at local positions [begin, end) of the list.
IntervalList subrange(const IntervalList& list, int64_t begin, int64_t end);

// Subranges of a list that ascend, in one walk over it: there may be as many as the list has intervals.
class Subranges {
 public:
  explicit Subranges(const IntervalList& list) : at_(list.begin()), end_(list.end()) {}

  // What is at local positions [begin, end); `begin` is no less than those before.
  void append_to(IntervalList& out, int64_t begin, int64_t end);

 private:
  IntervalList::const_iterator at_;
  IntervalList::const_iterator end_;
  int64_t position_ = 0;  // of at_, in the list
};

// The list moved so that it begins at 0: lists that differ in their place alone become equal.
IntervalList moved_to_zero(IntervalList list);

// A run of indices that two lists share, with its place in each.
struct Piece {
  int64_t length = 0;
  int64_t a_position = 0;
  int64_t b_position = 0;
};

// The shared runs, ascending. Both owners of a pair of lists get the same runs in the same order, which is what
// makes a packed message mean the same on both sides.
std::vector<Piece> intersect(const IntervalList& a, const IntervalList& b);

// All runs that two lists share: their indices together, how many runs there are, and where the first begins in each.
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
