// Finds the indices of several lists that are enough to know what happens to all of them, if the lists repeat.
//
// If all lists repeat, what one does in the least common multiple of their periods happens in every repetition of
// it. So such a stretch has one *sample*, its first repetition; what lies between is in samples that come once. Of 28
// rows that Cyclic(0,2) cuts over 2 and Cyclic(0,3) over 2, rows [0, 12) come twice, and rows [24, 28) once.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/region.h"

namespace shardwright {

struct Sample {
  Interval first;     // its length is the period
  int64_t count = 1;  // of repetitions
};

class Samples {
 public:
  // The samples have all indices of the lists. What repeats is divided into so many samples one after the other, of
  // about as many repetitions each.
  explicit Samples(const std::vector<const std::vector<IntervalList>*>& lists, int64_t divisions = 1);

  const std::vector<Sample>& all() const { return all_; }  // ascending
  // Returns the sample with this index.
  const Sample& at(int64_t index) const;
  // Returns what one of the lists has in all samples, ascending and divided where a sample ends.
  std::vector<Interval> in(const IntervalList& list) const;
  // Returns how many intervals that is at most, from the numbers of repetitions alone.
  int64_t most_in(const IntervalList& list) const;
  // Returns intervals that ascend and are divided in this way, in all repetitions of their samples.
  IntervalList repeated(const std::vector<Interval>& intervals) const;

 private:
  void add(Interval range, int64_t period, int64_t divisions);
  // Calls visit(block, first, last, range) for each block of a list and each sample whose range has the repetitions
  // [first, last) of the block, or parts of them.
  template <typename Visit>
  void for_each_block(const IntervalList& list, const Visit& visit) const;

  std::vector<Sample> all_;
};

// Indices that the same lists have, within one sample.
struct Stretch {
  Interval interval;
  std::vector<int64_t> lists;  // ascending, by number, at least one
  int64_t count = 1;           // of the sample's repetitions
};

// Returns the stretches of lists whose indices are all in the samples, ascending.
std::vector<Stretch> stretches(const Samples& samples, const std::vector<const IntervalList*>& lists);

}  // namespace shardwright
