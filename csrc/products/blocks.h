// Cuts the data that ranks send each other in the chunked step of a Matmul into chunks.
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
// together. The rank's own part is not sent, but counts as one of the schedule's chunks. Distances that the user chose
// (Schedule::distances) are used unchanged.
//
//   4 partners, 8 chunks: {1} share 0 of 2, {1} share 1 of 2, {2} ..., {3} ...
//   4 partners, 3 chunks: {1}, {2, 3}
std::vector<Chunk> ring_chunks(int64_t partners, const Schedule& schedule);

// Returns the chunks that collectives move: each is one share of the parts at all distances. One partner (the rank
// itself) needs no chunks.
//
//   4 partners, 2 chunks: {1, 2, 3} share 0 of 2, {1, 2, 3} share 1 of 2
std::vector<Chunk> collective_chunks(int64_t partners, int64_t chunks);

// Returns the chunk's share, along one tensor dim, of `selection`: the data that one rank sends to another rank.
// Returns nullopt if the share is empty. A tensor without dims is not cut.
std::optional<Selection> share_of(const Selection& selection, size_t dim, const Chunk& chunk);

// Returns the tensor dim along which parts are cut into shares: the first of `dims` along which an average part of the
// layout has at least `shares` elements, else the dim along which it has most. The choice depends on the layout alone,
// so all ranks choose the same dim.
size_t dim_to_share(const Layout& layout, const std::vector<size_t>& dims, int64_t shares);

// Returns true if any two of these parts cover either equal or disjoint boxes of the receiver's tensor along `dims`.
bool are_equal_or_disjoint(const std::vector<Selection::Part>& parts, const std::vector<size_t>& dims);

}  // namespace shardwright
