// Finds a few indices, the *samples*, from which the overlaps of several lists follow if the lists repeat.
//
// If all lists repeat, their overlaps within the least common multiple of their periods repeat with it. So a range with
// such repetitions has one *sample*, its first repetition. The indices between such ranges are in samples that occur
// once. Example: 100 rows, cut as Cyclic(0,2) over 2 before and as Cyclic(0,3) over 2 after. The periods are 4 and 6.
//
//   [3, 15)                 occurs 7 times, up to row 87: the period of all four lists is 12
//   [0, 3) and [87, 100)    occur once: some list has not begun or has ended
#pragma once

#include <cstdint>
#include <vector>

#include "layout/region.h"

namespace shardwright {

// A range of indices that repeats `count` times without gaps, or once.
struct Sample {
  Interval first;     // first repetition; its length is the period
  int64_t count = 1;  // number of repetitions
};

class Samples {
 public:
  // `lists` are the lists of one or more layouts. The samples cover all their indices. A repeating range is divided
  // into `divisions` consecutive samples with about equally many repetitions, or fewer if it has fewer repetitions.
  explicit Samples(const std::vector<const std::vector<IntervalList>*>& lists, int64_t divisions = 1);

  const std::vector<Sample>& all() const { return all_; }  // ascending
  // Returns the sample whose repetitions contain this index, which must be in a sample.
  const Sample& at(int64_t index) const;
  // Returns the intervals of a list in all samples, ascending and divided at the ends of samples.
  std::vector<Interval> in(const IntervalList& list) const;
  // Returns an upper bound on the number of intervals of in(list), without listing them.
  int64_t max_intervals_in(const IntervalList& list) const;
  // Returns the indices whose first repetitions are in these intervals: the inverse of in(). The intervals must ascend
  // and be divided at the ends of samples.
  IntervalList repeated(const std::vector<Interval>& intervals) const;

 private:
  // Adds the samples of a range that repeats with this period; 0 if it does not repeat.
  void add(Interval range, int64_t period, int64_t divisions);
  // Calls visit(block, first, last, range) for each block of a list and each sample. `range` is the sample's first
  // repetition. Repetitions [first, last) of the block overlap it.
  template <typename Visit>
  void for_each_block(const IntervalList& list, const Visit& visit) const;

  std::vector<Sample> all_;
};

// A range of indices within one sample, and the lists that contain all of them. Other lists contain none of them.
struct SampleRange {
  Interval interval;
  std::vector<int64_t> lists;  // indices of the lists, ascending, at least one
  int64_t count = 1;           // number of the sample's repetitions
};

// Returns the sample ranges of these lists, ascending. All indices of the lists must be in the samples. Example:
// without repetitions, the lists [0, 6) and [4, 8) have the ranges [0, 4) of list 0, [4, 6) of both, and [6, 8) of
// list 1.
std::vector<SampleRange> sample_ranges(const Samples& samples, const std::vector<const IntervalList*>& lists);

}  // namespace shardwright
