// Cuts the data that ranks have for each other into chunks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/selection.h"
#include "moves/plan.h"
#include "products/matmul.h"

namespace shardwright {

// One chunk holds one share of the part of every rank at these distances. Seen from the i-th of k ranks, the rank at
// distance d is the (i + d)-th, modulo k.
struct Chunk {
  std::vector<int64_t> distances;
  int64_t share = 0;
  int64_t shares = 1;
};

// Chunks that travel as messages, over distances 1 to partners - 1 in this order. With at least as many chunks as
// partners, each part is cut into chunks / partners shares. With fewer, a chunk takes several distances together; one
// of the `chunks` counts as the rank's own part, which does not travel. Distances given by hand are taken as they are.
//
//   4 partners, 8 chunks: {1} share 0 of 2, {1} share 1 of 2, {2} ..., {3} ...
//   4 partners, 3 chunks: {1}, {2, 3}
std::vector<Chunk> ring_chunks(int64_t partners, const Schedule& schedule);

// Chunks that travel by collectives: each holds one share of the parts at all distances.
std::vector<Chunk> collective_chunks(int64_t partners, int64_t chunks);

// Returns the chunk's share, along one dim, of what two ranks have for each other, or nothing if it is empty.
std::optional<Selection> share_of(const Selection& whole, size_t dim, const Chunk& chunk);

// Chooses the tensor dim that shares are taken along: the first of `dims` whose parts have at least `shares` elements,
// else the longest. It depends on the layout alone, so all ranks choose the same dim.
size_t dim_to_share(const Layout& layout, const std::vector<size_t>& dims, int64_t shares);

// Returns whether every two of these parts cover either the same range of `dims` in b or disjoint ranges.
bool are_equal_or_apart(const std::vector<Selection::Part>& parts, const std::vector<size_t>& dims);

}  // namespace shardwright
