// How what ranks have for each other is cut into chunks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "moves/plan.h"
#include "products/matmul.h"
#include "program/boxes.h"

namespace shardwright {

// The shares of the parts at some distances. The rank at distance d of the i-th of k is the (i + d)-th, modulo k.
struct Chunk {
  std::vector<int64_t> distances;
  int64_t share = 0;
  int64_t shares = 1;
};

// Distances 1 to partners - 1, each part by messages of its own. Of `chunks` one is the own part's where they are no
// more than the partners; else every part is cut into chunks / partners shares. Or as said by hand.
std::vector<Chunk> ring_chunks(int64_t partners, const Schedule& schedule);

// All distances in every chunk.
std::vector<Chunk> collective_chunks(int64_t partners, int64_t chunks);

// A chunk's share along one dim of what two ranks have for each other; nothing where it is empty.
std::optional<Intersection> share_of(const Intersection& whole, size_t dim, const Chunk& chunk);

// The tensor dim that shares are taken along: of `dims`, the outermost that is at least `shares` long everywhere, else
// the longest. It depends on the layout alone, so that all ranks choose the same one.
size_t dim_to_share(const Layout& layout, const std::vector<size_t>& dims, int64_t shares);

// Whether any two of these parts cover the same range of `dims` in b, or ranges that are apart.
bool are_equal_or_apart(const std::vector<Intersection::Part>& parts, const std::vector<size_t>& dims);

}  // namespace shardwright
