// Cuts the data that ranks exchange into chunks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/selection.h"
#include "moves/plan.h"
#include "products/matmul.h"

namespace shardwright {

// A chunk: share number `share` of `shares` of the part of each rank at these distances. In a group of k ranks, the
// rank at distance d from rank i is rank (i + d) modulo k.
struct Chunk {
  std::vector<int64_t> distances;
  int64_t share = 0;
  int64_t shares = 1;
};

// Returns the chunks of a ring, which are sent as messages, nearest distance first. With at least as many chunks as
// partners, each part is cut into chunks / partners shares, rounded down. With fewer, a chunk takes several distances
// together. The rank's own part is not sent, but counts as one of the schedule's chunks. Distances given by hand are
// used unchanged.
//
//   4 partners, 8 chunks: {1} share 0 of 2, {1} share 1 of 2, {2} ..., {3} ...
//   4 partners, 3 chunks: {1}, {2, 3}
std::vector<Chunk> ring_chunks(int64_t partners, const Schedule& schedule);

// Returns the chunks that collectives move: each is one share of the parts at all distances.
//
//   4 partners, 2 chunks: {1, 2, 3} share 0 of 2, {1, 2, 3} share 1 of 2
std::vector<Chunk> collective_chunks(int64_t partners, int64_t chunks);

// Returns the chunk's share, along one dim, of the data that one rank sends another, or nullopt if the share is empty.
std::optional<Selection> share_of(const Selection& selection, size_t dim, const Chunk& chunk);

// Returns the tensor dim along which parts are cut into shares: the first of `dims` along which a part has at least
// `shares` elements, else the longest. It depends on the layout alone, so all ranks choose the same dim.
size_t dim_to_share(const Layout& layout, const std::vector<size_t>& dims, int64_t shares);

// True if any two of these parts cover equal or disjoint ranges of the receiver's tensor along `dims`.
bool are_equal_or_disjoint(const std::vector<Selection::Part>& parts, const std::vector<size_t>& dims);

}  // namespace shardwright
