// The scratch memory of attention products, in addition to buffers, and the tiles of rows that bound it.
//
// A product that is neither full nor a triangle, or has a mask, adds a bias to its scores: a tensor with one element
// for each pair of query and key. The product is computed in tiles of rows, each with the columns that its rows see, so
// that the bias of a tile takes at most kMostBiasBytes.
#pragma once

#include <cstdint>
#include <vector>

#include "program/attend.h"

namespace shardwright {

// Maximum bytes of the bias of a tile, unless a single row needs more.
inline constexpr int64_t kMostBiasBytes = int64_t{16} << 20;

// The rows of a bias begin at multiples of this many elements, as CUDA kernels require.
inline constexpr int64_t kBiasAlignment = 16;

// Bytes per element of a product's operands, and of its bias.
struct AttendItemBytes {
  int64_t operands = 0;
  int64_t bias = 0;
};

// Return the tiles by ascending rows; none if no query sees any key. A tile is the visible part of a range of rows. A
// product is one tile if it has no bias, or if its bias is equal for all rows.
//
//   64 rows, 64 columns, band {-15, 15}, and a limit of 512 elements: 10 rows see at most 40 columns, 48 with
//   alignment, which takes 480 elements. 11 rows would take 528. So a tile has 10 rows: rows 0 to 9 with columns 0 to
//   24, rows 10 to 19 with columns 0 to 34, rows 20 to 29 with columns 5 to 44, and so on.
std::vector<VisiblePart> tiles_of(const Attend& attend, const AttendItemBytes& item_bytes);
std::vector<VisiblePart> tiles_of(const AttendBackward& attend, const AttendItemBytes& item_bytes);

// Return the maximum scratch bytes that a product takes at once: the bias of a tile, and padded operands. If values
// have another depth than keys, the shallower operands are padded with zeros, because most fused kernels require equal
// depths. On devices other than the CPU, operands whose depth is not a multiple of 16 bytes are copied; these copies
// are not counted.
int64_t scratch_bytes(const Attend& attend, const AttendItemBytes& item_bytes);
int64_t scratch_bytes(const AttendBackward& attend, const AttendItemBytes& item_bytes);

}  // namespace shardwright
