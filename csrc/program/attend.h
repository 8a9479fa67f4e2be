// The instructions of attention, for programs (instructions.h).
//
// A block product is the attention of a block of queries to a block of keys and values. Its result is *partial*: for
// each query, the output as if there were no other keys, and lse, the logarithm of the sum of the exponentials of the
// query's scores. Two partial results over disjoint keys merge into the partial result over both sets of keys.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "program/buffer_range.h"

namespace shardwright {

// A block of rows of a tensor of heads: element (batch, head, row, i) is at
// offset + batch * batch_stride + head * head_stride + row * row_stride + i. Offsets and strides are in elements.
struct Heads {
  BufferId buffer = kMissingBuffer;
  int64_t offset = 0;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

// One number per row; the number of (batch, head, row) is at offset + batch * batch_stride + head * head_stride + row.
struct HeadRows {
  BufferId buffer = kMissingBuffer;
  int64_t offset = 0;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
};

// The sizes of a block product.
struct AttendSizes {
  int64_t batch = 0;
  int64_t heads = 0;        // number of query heads; a multiple of kv_heads
  int64_t kv_heads = 0;     // number of heads of keys and values; consecutive query heads share one
  int64_t rows = 0;         // number of queries
  int64_t columns = 0;      // number of keys
  int64_t depth = 0;        // elements per query or key head
  int64_t value_depth = 0;  // elements per value or result head
};

// The keys that each query sees: query i of a block sees key j of another block exactly if least <= i - j <= most. For
// causal attention within one block, least is 0 and most is kMax.
struct Band {
  static constexpr int64_t kMin = std::numeric_limits<int64_t>::min() / 4;
  static constexpr int64_t kMax = std::numeric_limits<int64_t>::max() / 4;

  int64_t least = kMin;  // kMin: no lower bound
  int64_t most = kMax;   // kMax: no upper bound

  bool sees(int64_t i, int64_t j) const { return least <= i - j && i - j <= most; }
  bool operator==(const Band&) const = default;
};

// The smallest rectangle with all visible pairs of a block product, and the band relative to its first row and column.
// Queries are rows, keys are columns.
//
//   4 rows, 6 columns, band {2, kMax}: row 2 sees column 0, row 3 sees columns 0 and 1. The part has rows 2 and 3,
//   columns 0 and 1, and the band {0, kMax - 2}: it is a triangle.
struct VisiblePart {
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t first_column = 0;
  int64_t columns = 0;
  Band band;
};

// Returns the visible part of a block product with this many rows and columns. Each row and each column of the part has
// a visible pair. Returns nullopt if no query sees any key.
std::optional<VisiblePart> visible_part(const Band& band, int64_t rows, int64_t columns);

// The visible pairs in the visible part of a block product.
enum class BlockShape : uint8_t {
  kSkip,      // there is no visible part: no query sees any key
  kFull,      // every query sees every key
  kTriangle,  // a square in which query i sees keys 0 to i
  kOther,
};
// Returns the shape of the visible part of a block product with this many rows and columns.
BlockShape shape_of(const Band& band, int64_t rows, int64_t columns);

// Returns the number of pairs (query, key) of one batch and head in which the query sees the key.
int64_t visible_pairs(const Band& band, int64_t rows, int64_t columns);

// A partial result, in float32 (float64 for float64 operands).
struct Partial {
  Heads out;
  HeadRows lse;
};

// A tensor with one element for each pair of a block product. The element of (batch, head, row, column) is at offset +
// batch * batch_stride + head * head_stride + row * row_stride + column * column_stride. Strides of 0 repeat elements.
// The mask is added to the scaled scores; if its dtype is bool, true means that the query sees the key.
struct PairMask {
  BufferId buffer = kMissingBuffer;
  int64_t offset = 0;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// result = the attention of q to k and v: softmax(scale * (q . k) + mask) v, over the keys that each query sees.
// Queries that see no key get zeros and an lse of minus infinity.
struct Attend {
  AttendSizes sizes;
  Band band;
  double scale = 1;  // factor of all scores
  Heads q;
  Heads k;
  Heads v;
  Partial result;
  std::optional<PairMask> mask = std::nullopt;  // requires a band in which every query sees every key
};

// dq, dk, dv += the gradients of a block product, in float32 (float64 for float64 operands). `out` and `lse` are the
// result over all blocks, not over this one, so the gradients of all blocks add up to the full gradients.
struct AttendBackward {
  AttendSizes sizes;
  Band band;
  double scale = 1;
  Heads q;
  Heads k;
  Heads v;
  Heads out;
  Heads dout;
  HeadRows lse;
  Heads dq;
  Heads dk;
  Heads dv;
  std::optional<PairMask> mask = std::nullopt;  // as in Attend
};

// left = left merged with right, a partial result over other keys. Uses only batch, heads, rows and value_depth of
// `sizes`.
struct Merge {
  AttendSizes sizes;
  Partial left;
  Partial right;
};

// dst += src, both in the dtype in which gradients are summed. Uses only batch, heads, rows and depth of `sizes`.
struct Accumulate {
  AttendSizes sizes;
  Heads src;
  Heads dst;
};

}  // namespace shardwright
