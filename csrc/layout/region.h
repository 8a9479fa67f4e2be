// Which indices of one tensor dim a rank holds, and in which order: the geometry under every move.
//
// An IntervalList is ascending and disjoint, and neighbouring intervals do not touch. So two lists are equal exactly
// when their sets of indices are. Cutting takes chunks by *local* position, as nested sharding does, and keeps these
// properties.
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

// Chunk `index` of `num_chunks` by torch.chunk: chunks have ceil(n / num_chunks) elements, trailing ones may be short
// or empty.   cut([0,5), 2, 1) = [3,5)      cut([0,2), 4, 3) = []
//
// With split_factor f > 1, DTensor's _StridedShard: chunk into f pieces, chunk each piece into num_chunks, and take
// chunk `index` of every piece.   cut([0,8), 2, 1, 2) = [2,4) [6,8)
IntervalList cut(const IntervalList& list, int64_t num_chunks, int64_t index, int64_t split_factor = 1);
// The length of that, from the length of the list.
int64_t cut_length(int64_t length, int64_t num_chunks, int64_t index, int64_t split_factor = 1);

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
