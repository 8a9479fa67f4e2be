// Lowers a contraction of strided tensors to the Gemm instructions that carry it out.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "products/contraction.h"
#include "program/builder.h"

namespace shardwright {

// A tensor in a buffer, with a stride for each axis of the contraction; axes that the tensor lacks have stride 0.
struct TensorView {
  BufferId buffer = kMissingBuffer;
  int64_t offset = 0;
  std::vector<int64_t> strides;

  // Moves the view `by` elements along an axis.
  void advance(int axis, int64_t by) { offset += by * strides[axis]; }
};

// The scales of operands of 8-bit floats: one per operand, with strides of 0, or one per row.
struct ScaleViews {
  TensorView lhs;
  TensorView rhs;
};

// Returns a view of a row-major tensor whose dims are these axes.
TensorView row_major_view(BufferId buffer, const std::vector<int>& dims, const std::vector<int64_t>& shape,
                          int num_axes);

// Returns a view of the scales of an operand with these axes: one scale for each place along the axes that are not
// summed over, which have `shape`. An empty shape means one scale for the full operand.
TensorView scales_view(const Contraction& axes, const std::vector<int>& operand, BufferId buffer,
                       const std::vector<int64_t>& shape);

// Emits out = lhs x rhs, where `sizes` has the length of each axis. With `accumulates` the product is added to the
// contents of `out`. Otherwise `bias`, a view with strides along some axes of the result, may be added (kMissingBuffer
// means no bias), but not to the product of scaled operands.
//
// Adjacent axes of one kind (free in lhs, free in rhs, summed) become one matrix dim where one continues the other in
// every tensor. Of axes that do not merge, the innermost becomes the matrix dim. Of the free axes outside of it, the
// longest may become the batch of one instruction; the others take one instruction per index. In "bsk,nk->bsn", a piece
// of s makes rows of s and a batch over b.
//
// A product that continues the previous product of the program is merged into it as more rows or columns. A product of
// the same sizes at another place is merged as one more batch entry. So consecutive blocks of many ranks become one
// product. Products with scales of rows are not batched.
void emit_gemms(ProgramBuilder& builder, const Contraction& axes, const std::vector<int64_t>& sizes,
                const TensorView& lhs, const TensorView& rhs, const TensorView& out, bool accumulates,
                const TensorView& bias = {}, const std::optional<ScaleViews>& scales = std::nullopt);

}  // namespace shardwright
