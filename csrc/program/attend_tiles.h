// The memory that products of attention take besides buffers, and the tiles of rows that bound it.
//
// A product that is neither full nor a triangle, or has a mask, is computed with a bias that is added to its scores. It
// is computed in tiles of rows, each with the columns that its rows see, so that the bias takes at most kMostBiasBytes.
#pragma once

#include <cstdint>
#include <vector>

#include "program/attend.h"

namespace shardwright {

// Most bytes of the bias of a tile, unless a single row needs more.
inline constexpr int64_t kMostBiasBytes = int64_t{16} << 20;

// Rows of a bias begin at multiples of this many elements, as kernels on CUDA require.
inline constexpr int64_t kBiasAlignment = 16;

// The dtypes of a product's operands, in bytes an element.
struct AttendItems {
  int64_t of_operands = 0;
  int64_t of_bias = 0;
};

// Returns the tiles, by ascending rows; none if no query sees any key. A tile is as visible_part: the part of its rows
// and columns that see something, and the band within it. A product without a bias is one tile.
std::vector<VisiblePart> tiles_of(const Attend& attend, const AttendItems& items);
std::vector<VisiblePart> tiles_of(const AttendBackward& attend, const AttendItems& items);

// The most bytes that a product takes at once: the bias of a tile, and padded operands. Where values have another depth
// than keys, the shallower operands are padded with zeros, because most fused kernels take equal depths. Not counted
// are the copies of operands whose depth is no multiple of 16 bytes, which devices other than the CPU need.
int64_t scratch_bytes(const Attend& attend, const AttendItems& items);
int64_t scratch_bytes(const AttendBackward& attend, const AttendItems& items);

}  // namespace shardwright
