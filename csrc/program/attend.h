// The instructions of attention, for programs (instructions.h).
//
// A block product is the attention of a block of queries to a block of keys and values. Its result is a *partial* one:
// for each query the output, as if these keys were all there are, and the logarithm of the sum of the exponentials of
// its scores (lse). Two partial results over disjoint keys merge into the partial result over both.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "program/buffer_range.h"

namespace shardwright {

// A block of rows of a tensor of heads: element (batch, head, row, i) is at
// offset + batch * batch_stride + head * head_stride + row * row_stride + i.
struct Heads {
  BufferId buffer = kMissingBuffer;
  int64_t offset = 0;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

// One number for each row: (batch, head, row) is at offset + batch * batch_stride + head * head_stride + row.
struct HeadRows {
  BufferId buffer = kMissingBuffer;
  int64_t offset = 0;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
};

struct AttendSizes {
  int64_t batch = 0;
  int64_t heads = 0;        // of queries; a multiple of kv_heads
  int64_t kv_heads = 0;     // consecutive heads of queries share one of keys and values
  int64_t rows = 0;         // queries
  int64_t columns = 0;      // keys
  int64_t depth = 0;        // elements of a head of queries and keys
  int64_t value_depth = 0;  // elements of a head of values and of results
};

// The keys that a query sees: query i of a block sees key j of another block exactly if least <= i - j <= most.
struct Band {
  static constexpr int64_t kMin = std::numeric_limits<int64_t>::min() / 4;
  static constexpr int64_t kMax = std::numeric_limits<int64_t>::max() / 4;

  int64_t least = kMin;
  int64_t most = kMax;

  bool sees(int64_t i, int64_t j) const { return least <= i - j && i - j <= most; }
  bool operator==(const Band&) const = default;
};

// The smallest rectangle that holds all pairs of a block product that see each other, and the band within it.
struct VisiblePart {
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t first_column = 0;
  int64_t columns = 0;
  Band band;
};

// Returns nothing if no query sees any key. Each row and each column of the part sees something.
std::optional<VisiblePart> visible_part(const Band& band, int64_t rows, int64_t columns);

enum class BlockShape : uint8_t {
  kSkip,      // no query sees any key
  kFull,      // every query sees every key
  kTriangle,  // a square in which query i sees keys 0 to i
  kOther,
};
// The shape of the visible part.
BlockShape shape_of(const Band& band, int64_t rows, int64_t columns);

// The number of pairs that see each other.
int64_t visible_pairs(const Band& band, int64_t rows, int64_t columns);

// A partial result, in float32 (in float64 for float64 operands).
struct Partial {
  Heads out;
  HeadRows lse;
};

// A tensor for each pair of a block product: element (batch, head, row, column) is at
// offset + batch * batch_stride + head * head_stride + row * row_stride + column * column_stride. Strides of 0 repeat
// elements. It is added to scaled scores; of dtype bool it says which keys a query sees.
struct PairMask {
  BufferId buffer = kMissingBuffer;
  int64_t offset = 0;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// result = the attention of q to k and v, with scores scaled. Queries that see no key get zeros and an lse of minus
// infinity.
struct Attend {
  AttendSizes sizes;
  Band band;
  double scale = 1;
  Heads q;
  Heads k;
  Heads v;
  Partial result;
  std::optional<PairMask> mask = std::nullopt;  // with a band that leaves nothing out
};

// dq, dk, dv += the gradients of a block product, in float32 (float64). `out` and `lse` are the whole result, not that
// of this block, so that the gradients of all blocks sum to those of the whole.
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

// left = left merged with right, a partial result over other keys. Only batch, heads, rows and value_depth count.
struct Merge {
  AttendSizes sizes;
  Partial left;
  Partial right;
};

// dst += src, where both have the dtype in which gradients are summed. Only batch, heads, rows and depth count.
struct Accumulate {
  AttendSizes sizes;
  Heads src;
  Heads dst;
};

}  // namespace shardwright
