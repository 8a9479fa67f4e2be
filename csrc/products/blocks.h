// Cuts the data that ranks exchange into chunks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/selection.h"
#include "moves/plan.h"
#include "products/matmul.h"

namespace shardwright {

// A chunk: one share of the part of each rank at these distances. From the i-th of k ranks, the rank at distance d is
// the (i + d)-th, modulo k.
struct Chunk {
  std::vector<int64_t> distances;
  int64_t share = 0;
  int64_t shares = 1;
};

// Returns the chunks that are sent as messages, over distances 1 to partners - 1 in this order. With at least as many
// chunks as partners, each part is cut into chunks / partners shares. With fewer, a chunk takes several distances
// together; one of the `chunks` counts as the rank's own part, which is not sent. Distances given by hand are used
// unchanged.
//
//   4 partners, 8 chunks: {1} share 0 of 2, {1} share 1 of 2, {2} ..., {3} ...
//   4 partners, 3 chunks: {1}, {2, 3}
std::vector<Chunk> ring_chunks(int64_t partners, const Schedule& schedule);

// Returns the chunks that collectives move: each holds one share of the parts at all distances.
std::vector<Chunk> collective_chunks(int64_t partners, int64_t chunks);

// Returns the chunk's share, along one dim, of the data that two ranks exchange, or nullopt if the share is empty.
std::optional<Selection> share_of(const Selection& selection, size_t dim, const Chunk& chunk);

// Returns the tensor dim along which shares are taken: the first of `dims` whose parts have at least `shares` elements,
// else the longest. It depends on the layout alone, so all ranks choose the same dim.
size_t dim_to_share(const Layout& layout, const std::vector<size_t>& dims, int64_t shares);

// True if every two of these parts cover, along `dims` of the receiver's tensor, either the same range or disjoint
// ranges.
bool are_equal_or_apart(const std::vector<Selection::Part>& parts, const std::vector<size_t>& dims);

}  // namespace shardwright
