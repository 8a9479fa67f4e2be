#include "program/attend.h"

#include <algorithm>

namespace shardwright {

std::optional<VisiblePart> visible_part(const Band& band, int64_t rows, int64_t columns) {
  // Query i sees keys i - most to i - least, if they exist.
  if (rows <= 0 || columns <= 0 || band.least > band.most) return std::nullopt;
  const int64_t first_row = std::max<int64_t>(0, band.least);
  const int64_t last_row = std::min(rows - 1, columns - 1 + band.most);
  const int64_t first_column = std::max<int64_t>(0, -band.most);
  const int64_t last_column = std::min(columns - 1, rows - 1 - band.least);
  if (first_row > last_row || first_column > last_column) return std::nullopt;
  const int64_t shift = first_column - first_row;
  const Band shifted{std::max(band.least + shift, Band::kMin), std::min(band.most + shift, Band::kMax)};
  return VisiblePart{first_row, last_row - first_row + 1, first_column, last_column - first_column + 1, shifted};
}

BlockShape shape_of(const Band& band, int64_t rows, int64_t columns) {
  const std::optional<VisiblePart> part = visible_part(band, rows, columns);
  if (!part) return BlockShape::kSkip;
  if (part->band.most < part->rows - 1) return BlockShape::kOther;
  if (part->band.least <= 1 - part->columns) return BlockShape::kFull;
  return part->band.least == 0 && part->rows == part->columns ? BlockShape::kTriangle : BlockShape::kOther;
}

int64_t visible_pairs(const Band& band, int64_t rows, int64_t columns) {
  const std::optional<VisiblePart> part = visible_part(band, rows, columns);
  if (!part) return 0;
  int64_t pairs = 0;
  for (int64_t i = 0; i < part->rows; ++i) {
    const int64_t first = std::max<int64_t>(0, i - part->band.most);
    const int64_t last = std::min(part->columns - 1, i - part->band.least);
    pairs += std::max<int64_t>(0, last - first + 1);
  }
  return pairs;
}

}  // namespace shardwright
