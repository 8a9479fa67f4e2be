#include "program/attend_tiles.h"

#include <algorithm>

#include "support/ceil_divide.h"

namespace shardwright {
namespace {

// Returns the bytes of a bias per pair of row and column. A mask may have other elements for each batch and head. A
// band has one bias for all batches and heads. It is the sum of two tensors, one for each side of the band, which exist
// at the same time.
template <typename Product>
int64_t bytes_per_pair(const Product& o, const AttendItemBytes& item_bytes) {
  if (!o.mask) return 2 * item_bytes.bias;
  return item_bytes.bias * (o.mask->batch_stride == 0 ? 1 : o.sizes.batch) *
         (o.mask->head_stride == 0 ? 1 : o.sizes.heads);
}

// Returns the number of elements from one row of a bias to the next in memory.
int64_t row_length(int64_t columns) { return ceil_divide(columns, kBiasAlignment) * kBiasAlignment; }

// Returns the largest number of rows of a tile whose bias has at most `max_elements` elements, at least 1, by
// bisection. If a band is bounded on both sides, the rows of a small tile see fewer than all columns.
int64_t rows_of_tile(const VisiblePart& part, int64_t max_elements) {
  const auto fits = [&](int64_t rows) {
    const int64_t seen = part.band.most - part.band.least + rows;
    return rows * row_length(std::min(part.columns, seen)) <= max_elements;
  };
  int64_t fitting = 1;
  int64_t too_many = part.rows + 1;
  while (too_many - fitting > 1) {
    const int64_t middle = fitting + (too_many - fitting) / 2;
    (fits(middle) ? fitting : too_many) = middle;
  }
  return fitting;
}

// Returns the tiles of a product. Divides it into rows only if its bias has rows: with a mask that differs by row, or a
// band that is neither full nor a triangle.
template <typename Product>
std::vector<VisiblePart> tiles(const Product& o, const AttendItemBytes& item_bytes) {
  const std::optional<VisiblePart> all = visible_part(o.band, o.sizes.rows, o.sizes.columns);
  if (!all) return {};
  const bool has_rows =
      o.mask ? o.mask->row_stride != 0 : shape_of(all->band, all->rows, all->columns) == BlockShape::kOther;
  if (!has_rows) return {*all};
  const int64_t tile_rows = rows_of_tile(*all, kMostBiasBytes / bytes_per_pair(o, item_bytes));
  std::vector<VisiblePart> tiles;
  for (int64_t first = 0; first < all->rows; first += tile_rows) {
    // The band relative to row `first`.
    const Band band{std::max(all->band.least - first, Band::kMin), std::max(all->band.most - first, Band::kMin)};
    std::optional<VisiblePart> tile = visible_part(band, std::min(tile_rows, all->rows - first), all->columns);
    if (!tile) continue;
    tile->first_row += all->first_row + first;
    tile->first_column += all->first_column;
    tiles.push_back(*tile);
  }
  return tiles;
}

// Returns the bytes of the largest bias of a tile; 0 if no tile has a bias.
template <typename Product>
int64_t bias_bytes(const Product& o, const AttendItemBytes& item_bytes) {
  int64_t largest = 0;
  for (const VisiblePart& tile : tiles(o, item_bytes)) {
    if (!o.mask && shape_of(tile.band, tile.rows, tile.columns) != BlockShape::kOther) continue;
    const int64_t rows = o.mask && o.mask->row_stride == 0 ? 1 : tile.rows;
    largest = std::max(largest, rows * row_length(tile.columns) * bytes_per_pair(o, item_bytes));
  }
  return largest;
}

// Returns the number of elements of all padded tensors, padding included. If values are shallower than keys, v and
// `num_results` tensors shaped like the result are padded; if values are deeper, q and k. With equal depths it is 0.
int64_t padded_elements(const AttendSizes& s, int64_t num_results) {
  const int64_t of_queries = s.batch * s.heads * s.rows * std::max(s.depth, s.value_depth);
  const int64_t of_keys = s.batch * s.kv_heads * s.columns * std::max(s.depth, s.value_depth);
  if (s.value_depth == s.depth) return 0;
  return of_keys + (s.value_depth < s.depth ? num_results : 1) * of_queries;
}

}  // namespace

std::vector<VisiblePart> tiles_of(const Attend& attend, const AttendItemBytes& item_bytes) {
  return tiles(attend, item_bytes);
}

std::vector<VisiblePart> tiles_of(const AttendBackward& attend, const AttendItemBytes& item_bytes) {
  return tiles(attend, item_bytes);
}

int64_t scratch_bytes(const Attend& attend, const AttendItemBytes& item_bytes) {
  return bias_bytes(attend, item_bytes) + padded_elements(attend.sizes, 0) * item_bytes.operands;
}

int64_t scratch_bytes(const AttendBackward& attend, const AttendItemBytes& item_bytes) {
  constexpr int64_t kResults = 2;  // the result and its gradient
  return bias_bytes(attend, item_bytes) + padded_elements(attend.sizes, kResults) * item_bytes.operands;
}

}  // namespace shardwright
