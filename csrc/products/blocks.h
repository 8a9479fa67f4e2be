// Cuts the data that ranks send each other in the chunked step of a Matmul into chunks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/selection.h"
#include "moves/plan.h"
#include "products/matmul.h"

namespace shardwright {

// A chunk of the moved data. The part of each rank at one of these distances is cut into `shares` shares; the chunk has
// share number `share`, from 0, of each of these parts. In a group of k ranks, the rank at distance d from rank i is
// rank (i + d) modulo k.
struct Chunk {
  std::vector<int64_t> distances;
  int64_t share = 0;
  int64_t shares = 1;
};

// Returns the chunks of a ring, which are sent as messages, nearest distance first. `partners` is the number of ranks,
// this rank included; one partner has no chunks. With at least as many chunks as partners, each part is cut into
// chunks / partners shares, rounded down. With fewer chunks, a chunk takes several distances together. The chunks of
// the rank's own part are not sent and not returned, but Schedule::chunks counts them. Distances that the user chose
// (Schedule::distances) are used unchanged.
//
//   4 partners, 8 chunks: {1} share 0 of 2, {1} share 1 of 2, {2} ..., {3} ...
//   4 partners, 3 chunks: {1}, {2, 3}
std::vector<Chunk> ring_chunks(int64_t partners, const Schedule& schedule);

// Returns the chunks that collectives move: each is one share of the parts at all distances. Returns none for one
// partner, which is the rank itself.
//
//   4 partners, 2 chunks: {1, 2, 3} share 0 of 2, {1, 2, 3} share 1 of 2
std::vector<Chunk> collective_chunks(int64_t partners, int64_t chunks);

// Returns the chunk's share of `selection`, which is the data that one rank sends to another rank. Shares are cut along
// the tensor dim `dim`; a tensor without dims is not cut. Returns nullopt if the share is empty.
std::optional<Selection> share_of(const Selection& selection, size_t dim, const Chunk& chunk);

// Returns the tensor dim along which parts are cut into shares: the first of `dims` along which an average part of the
// layout has at least `shares` elements, else the dim along which it has most. `dims` must not be empty. The choice
// depends on the global layout, not on the rank, so all ranks choose the same dim.
size_t dim_to_share(const Layout& layout, const std::vector<size_t>& dims, int64_t shares);

// Returns true if any two of these parts cover either equal or disjoint boxes of the receiver's tensor along `dims`.
bool are_equal_or_disjoint(const std::vector<Selection::Part>& parts, const std::vector<size_t>& dims);

}  // namespace shardwright
