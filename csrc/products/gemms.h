// From a contraction of strided tensors to the matrix products that carry it out.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "products/contraction.h"
#include "program/builder.h"

namespace shardwright {

// A tensor in a buffer, by the stride of each axis; those it lacks have 0.
struct TensorView {
  BufferId buffer = kMissingBuffer;
  int64_t offset = 0;
  std::vector<int64_t> strides;

  // To where the part begins that lies so far along an axis.
  void advance(int axis, int64_t by) { offset += by * strides[axis]; }
};

// Of operands of 8-bit floats: one scale each, with strides of 0, or one for each row.
struct ScaleViews {
  TensorView lhs;
  TensorView rhs;
};

// Row-major, with these dims.
TensorView row_major_view(BufferId buffer, const std::vector<int>& dims, const std::vector<int64_t>& shape,
                          int num_axes);

// Scales of an operand with these axes, in a buffer: one for each place along those that are not summed over, which
// have `shape`; without a shape one for all.
TensorView scales_view(const Contraction& axes, const std::vector<int>& operand, BufferId buffer,
                       const std::vector<int64_t>& shape);

std::vector<int64_t> sizes_at(const std::vector<int64_t>& shape, const std::vector<int>& dims);

// out = lhs x rhs over `sizes`, by axis; with `accumulates` added to what is there, else `bias`, a view with strides
// along some axes of the result, may be added (kMissingBuffer: none), but not to scaled operands.
//
// Axes of one kind (free in lhs, free in rhs, summed) become one matrix dim where they lie dense in both tensors. Of
// others the innermost does; over those outside of it, one at most is a batch of a single instruction, and the rest are
// instructions of their own.   "bsk,nk->bsn", a piece of s: rows of s, a batch over b.
//
// A product that goes on where the one before it in the program ended becomes one with it, as more rows or columns; one
// that is the same at other places, as a batch. So the blocks of many ranks that lie behind each other are one product.
// With scales of rows there are no batches.
void emit_gemms(ProgramBuilder& builder, const Contraction& axes, const std::vector<int64_t>& sizes,
                const TensorView& lhs, const TensorView& rhs, const TensorView& out, bool accumulates,
                const TensorView& bias = {}, const std::optional<ScaleViews>& scales = std::nullopt);

}  // namespace shardwright
