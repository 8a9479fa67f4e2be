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
  int64_t offset = 0;            // in elements
  std::vector<int64_t> strides;  // by axis, in elements

  // Moves the view `by` elements along an axis.
  void advance(int axis, int64_t by) { offset += by * strides[axis]; }
};

// Views of the scales of both operands, for operands of 8-bit floats: one scale per operand, with strides of 0, or one
// per row.
struct ScaleViews {
  TensorView lhs;
  TensorView rhs;
};

// Returns a view of a row-major tensor of this shape that begins with its buffer. `tensor_axes` has the axis of each
// dim of the tensor; `num_axes` is the number of axes of the contraction.
TensorView row_major_view(BufferId buffer, const std::vector<int>& tensor_axes, const std::vector<int64_t>& shape,
                          int num_axes);

// Returns a view of an operand's scales. `operand_axes` is axes.lhs or axes.rhs. There is one scale for each index
// along the operand's free dims, whose lengths are `shape`, or one scale for the full operand if `shape` is empty.
TensorView scales_view(const Contraction& axes, const std::vector<int>& operand_axes, BufferId buffer,
                       const std::vector<int64_t>& shape);

// Emits out = lhs x rhs, where `sizes` has the length of each axis. With `accumulates`, the product is added to the
// contents of `out`, and `bias` is ignored. Without, `bias` is added: a view with strides along some axes of the result
// (kMissingBuffer: no bias). Products of scaled operands have no bias. If a summed axis has length 0, `out` becomes
// zeros or the bias, or stays unchanged with `accumulates`. Emits nothing for a result without elements.
//
// Axes are of three kinds: free in lhs, free in rhs, summed. Adjacent axes of one kind are merged if every tensor
// stores them like one longer axis. The innermost merged axis of each kind becomes the matrix dim m, n or k. Of the
// other free axes, the longest may become the batch of one instruction; all others take one instruction per index.
//
//   "bsk,nk->bsn" with b = 2, s = 4, k = 8, n = 3, all tensors row-major:
//     all elements        b and s are merged: one Gemm with m = 8, n = 3, k = 8
//     2 of the 4 s        b and s do not merge (strides 32 and 8, 2 * 8 < 32): m = 2, n = 3, k = 8, a batch of 2 over b
//     2 of the 4 s, bias  a Gemm with a bias has no batch: one Gemm with m = 2, n = 3, k = 8 for each of the 2 b
//
// A new Gemm is merged into the chunk's last instruction if that is a Gemm to which the new one adds rows or columns. A
// product of equal sizes at other offsets is merged as one more batch entry, unless rows have scales. So consecutive
// blocks of many ranks become one product.
void emit_gemms(ProgramBuilder& builder, const Contraction& axes, const std::vector<int64_t>& sizes,
                const TensorView& lhs, const TensorView& rhs, const TensorView& out, bool accumulates,
                const TensorView& bias = {}, const std::optional<ScaleViews>& scales = std::nullopt);

}  // namespace shardwright
