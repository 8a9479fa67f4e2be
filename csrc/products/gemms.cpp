#include "products/gemms.h"

#include <algorithm>
#include <optional>

namespace shardwright {
namespace {

// One axis, or several that were merged into one: its size, and its stride in each tensor.
struct MergedAxis {
  int64_t size = 1;
  int64_t lhs = 0;
  int64_t rhs = 0;
  int64_t out = 0;
  int64_t bias = 0;
  int64_t lhs_scale = 0;
  int64_t rhs_scale = 0;

  // True if every tensor stores this axis and `inner`, the next axis inward, like one longer axis.
  bool can_merge(const MergedAxis& inner) const {
    return lhs == inner.lhs * inner.size && rhs == inner.rhs * inner.size && out == inner.out * inner.size &&
           bias == inner.bias * inner.size && lhs_scale == inner.lhs_scale * inner.size &&
           rhs_scale == inner.rhs_scale * inner.size;
  }
};

// Merges adjacent axes where that is possible. `axes` are listed outermost first. Axes of size 1 are dropped.
std::vector<MergedAxis> merge_axes(const std::vector<MergedAxis>& axes) {
  std::vector<MergedAxis> merged;
  for (const MergedAxis& axis : axes) {
    if (axis.size == 1) continue;
    if (!merged.empty() && merged.back().can_merge(axis)) {
      const int64_t size = merged.back().size * axis.size;
      merged.back() = axis;
      merged.back().size = size;
    } else {
      merged.push_back(axis);
    }
  }
  return merged;
}

// Removes the innermost axis from the list and returns it: the matrix dim m, n or k. Returns an axis of size 1 if the
// list is empty.
MergedAxis take_matrix_dim(std::vector<MergedAxis>& axes) {
  if (axes.empty()) return {};
  const MergedAxis inner = axes.back();
  axes.pop_back();
  return inner;
}

// Advances all matrices and scales of the product by `index` along an axis.
void advance(Gemm& gemm, const MergedAxis& axis, int64_t index) {
  gemm.lhs.offset += index * axis.lhs;
  gemm.rhs.offset += index * axis.rhs;
  gemm.dst.offset += index * axis.out;
  if (gemm.bias) gemm.bias->offset += index * axis.bias;
  if (gemm.lhs_scale) gemm.lhs_scale->offset += index * axis.lhs_scale;
  if (gemm.rhs_scale) gemm.rhs_scale->offset += index * axis.rhs_scale;
}

// The differences between the offsets of two products, one for each matrix and scale.
struct OffsetDifference {
  int64_t lhs = 0;
  int64_t rhs = 0;
  int64_t dst = 0;
  int64_t bias = 0;
  int64_t lhs_scale = 0;
  int64_t rhs_scale = 0;
};

// Return true if two matrices or scales differ at most in their offsets.
bool differ_only_in_offset(const Matrix& a, const Matrix& b) {
  return a.buffer == b.buffer && a.row_stride == b.row_stride && a.column_stride == b.column_stride;
}

bool differ_only_in_offset(const std::optional<Scale>& a, const std::optional<Scale>& b) {
  return a.has_value() == b.has_value() && (!a || (a->buffer == b->buffer && a->stride == b->stride));
}

// Returns the offsets of `b` minus the offsets of `a`. Returns nullopt if `b` has a batch, or if the two products
// differ in anything but offsets, m, n and the batch of `a`.
std::optional<OffsetDifference> offset_difference(const Gemm& a, const Gemm& b) {
  if (!differ_only_in_offset(a.lhs, b.lhs) || !differ_only_in_offset(a.rhs, b.rhs) ||
      !differ_only_in_offset(a.dst, b.dst))
    return std::nullopt;
  if (a.accumulates != b.accumulates || a.bias.has_value() != b.bias.has_value() || a.k != b.k || b.count != 1) {
    return std::nullopt;
  }
  if (a.bias && !differ_only_in_offset(*a.bias, *b.bias)) return std::nullopt;
  if (!differ_only_in_offset(a.lhs_scale, b.lhs_scale) || !differ_only_in_offset(a.rhs_scale, b.rhs_scale))
    return std::nullopt;
  return OffsetDifference{b.lhs.offset - a.lhs.offset,
                          b.rhs.offset - a.rhs.offset,
                          b.dst.offset - a.dst.offset,
                          a.bias ? b.bias->offset - a.bias->offset : 0,
                          a.lhs_scale ? b.lhs_scale->offset - a.lhs_scale->offset : 0,
                          a.rhs_scale ? b.rhs_scale->offset - a.rhs_scale->offset : 0};
}

// Returns the stride of a scale; 0 for one factor, or without a scale.
int64_t stride_of(const std::optional<Scale>& scale) { return scale ? scale->stride : 0; }

// Merges `next` into `last` as more rows, more columns or one more batch entry. Returns false, and changes nothing, if
// that is not possible. Products that write the same elements stay separate.
bool try_merge(Gemm& last, const Gemm& next) {
  const std::optional<OffsetDifference> by = offset_difference(last, next);
  if (!by || by->dst == 0) return false;
  // True if `next` begins `size` rows, columns or batch entries after `last`, whose strides are `stride`.
  const auto continues = [&](int64_t size, const OffsetDifference& stride) {
    return by->lhs == size * stride.lhs && by->rhs == size * stride.rhs && by->dst == size * stride.dst &&
           by->bias == size * stride.bias && by->lhs_scale == size * stride.lhs_scale &&
           by->rhs_scale == size * stride.rhs_scale;
  };
  const OffsetDifference row_strides{
      last.lhs.row_stride, 0, last.dst.row_stride, last.bias ? last.bias->row_stride : 0, stride_of(last.lhs_scale), 0};
  const OffsetDifference column_strides{
      0, last.rhs.column_stride,   last.dst.column_stride, last.bias ? last.bias->column_stride : 0,
      0, stride_of(last.rhs_scale)};
  if (last.count == 1 && last.n == next.n && continues(last.m, row_strides)) {
    last.m += next.m;
    return true;
  }
  if (last.count == 1 && last.m == next.m && continues(last.n, column_strides)) {
    last.n += next.n;
    return true;
  }
  // The entries of a batch run concurrently, so entries that accumulate could write to the same elements.
  if (last.bias || last.accumulates || last.m != next.m || last.n != next.n) return false;
  const bool has_scales_of_rows =
      stride_of(last.lhs_scale) != 0 || stride_of(last.rhs_scale) != 0 || by->lhs_scale != 0 || by->rhs_scale != 0;
  if (has_scales_of_rows) return false;
  if (by->lhs < 0 || by->rhs < 0 || by->dst < 0) return false;
  if (last.count == 1) {
    last.lhs_batch_stride = by->lhs;
    last.rhs_batch_stride = by->rhs;
    last.dst_batch_stride = by->dst;
  } else if (!continues(last.count, {last.lhs_batch_stride, last.rhs_batch_stride, last.dst_batch_stride})) {
    return false;
  }
  ++last.count;
  return true;
}

// Emits a product, or merges it into the chunk's last instruction.
void emit_merged(ProgramBuilder& builder, Gemm gemm) {
  if (Instruction* last = builder.last_of_chunk()) {
    if (auto* previous = std::get_if<Gemm>(&last->operation); previous != nullptr && try_merge(*previous, gemm)) return;
  }
  builder.emit(std::move(gemm));
}

// The axes of a contraction by kind, merged where possible.
struct AxesByKind {
  std::vector<MergedAxis> rows;     // free in lhs
  std::vector<MergedAxis> columns;  // free in rhs
  std::vector<MergedAxis> summed;
  bool result_is_empty = false;  // an axis of the result has length 0
  bool sum_is_empty = false;     // a summed axis has length 0
};

// Sorts the axes of a contraction by kind, and merges them. `strided(axis)` returns the MergedAxis of one axis.
template <typename Strided>
AxesByKind axes_by_kind(const Contraction& axes, const std::vector<int64_t>& sizes, const Strided& strided) {
  AxesByKind all;
  for (const int axis : axes.out) {
    all.result_is_empty = all.result_is_empty || sizes[axis] == 0;
    (has_axis(axes.lhs, axis) ? all.rows : all.columns).push_back(strided(axis));
  }
  for (const int axis : axes.lhs) {
    if (!axes.is_summed(axis)) continue;
    all.summed.push_back(strided(axis));
    all.sum_is_empty = all.sum_is_empty || sizes[axis] == 0;
  }
  all.rows = merge_axes(all.rows);
  all.columns = merge_axes(all.columns);
  all.summed = merge_axes(all.summed);
  return all;
}

// Returns true if the scale of an operand changes along the axis.
bool has_scale_stride(const MergedAxis& axis) { return axis.lhs_scale != 0 || axis.rhs_scale != 0; }

// Makes the longest of the outer axes the batch of the product, and removes it from `outer`. Does nothing for a product
// with a bias or row scales, which has no batch.
void take_batch(Gemm& gemm, std::vector<MergedAxis>& outer) {
  const auto longest = std::max_element(outer.begin(), outer.end(),
                                        [](const MergedAxis& a, const MergedAxis& b) { return a.size < b.size; });
  if (longest == outer.end() || gemm.bias) return;
  if (stride_of(gemm.lhs_scale) != 0 || stride_of(gemm.rhs_scale) != 0 || has_scale_stride(*longest)) return;
  gemm.count = longest->size;
  gemm.lhs_batch_stride = longest->lhs;
  gemm.rhs_batch_stride = longest->rhs;
  gemm.dst_batch_stride = longest->out;
  outer.erase(longest);
}

// Emits the product once for each combination of indices along the axes `free` and `summed`. Indices of summed axes
// change fastest, so the first product for each part of the result writes the part, and the following products
// accumulate.
void emit_repeated(ProgramBuilder& builder, const Gemm& gemm, const std::vector<MergedAxis>& free,
                   const std::vector<MergedAxis>& summed) {
  std::vector<MergedAxis> outer = free;
  outer.insert(outer.end(), summed.begin(), summed.end());
  std::vector<int64_t> index(outer.size(), 0);
  while (true) {
    Gemm product = gemm;
    bool is_first = true;
    for (size_t d = 0; d < outer.size(); ++d) {
      advance(product, outer[d], index[d]);
      if (d >= free.size() && index[d] > 0) is_first = false;
    }
    if (!is_first) {
      product.accumulates = true;
      product.bias.reset();
    }
    emit_merged(builder, std::move(product));
    size_t d = outer.size();
    while (d > 0 && ++index[d - 1] == outer[d - 1].size) index[--d] = 0;
    if (d == 0) return;
  }
}

}  // namespace

TensorView row_major_view(BufferId buffer, const std::vector<int>& tensor_axes, const std::vector<int64_t>& shape,
                          int num_axes) {
  TensorView view{buffer, 0, std::vector<int64_t>(num_axes, 0)};
  int64_t stride = 1;
  for (size_t d = tensor_axes.size(); d-- > 0;) {
    view.strides[tensor_axes[d]] = stride;
    stride *= shape[d];
  }
  return view;
}

TensorView scales_view(const Contraction& axes, const std::vector<int>& operand_axes, BufferId buffer,
                       const std::vector<int64_t>& shape) {
  if (shape.empty()) return {buffer, 0, std::vector<int64_t>(axes.num_axes(), 0)};
  std::vector<int> free_axes;
  for (const int d : free_dims_of(axes, operand_axes)) free_axes.push_back(operand_axes[d]);
  return row_major_view(buffer, free_axes, shape, axes.num_axes());
}

void emit_gemms(ProgramBuilder& builder, const Contraction& axes, const std::vector<int64_t>& sizes,
                const TensorView& lhs, const TensorView& rhs, const TensorView& out, bool accumulates,
                const TensorView& bias, const std::optional<ScaleViews>& scales) {
  const bool has_bias = bias.buffer != kMissingBuffer;
  AxesByKind all = axes_by_kind(axes, sizes, [&](int axis) {
    return MergedAxis{sizes[axis],
                      lhs.strides[axis],
                      rhs.strides[axis],
                      out.strides[axis],
                      has_bias ? bias.strides[axis] : 0,
                      scales ? scales->lhs.strides[axis] : 0,
                      scales ? scales->rhs.strides[axis] : 0};
  });
  if (all.result_is_empty || (all.sum_is_empty && accumulates)) return;
  const MergedAxis m = take_matrix_dim(all.rows);
  const MergedAxis n = take_matrix_dim(all.columns);
  const MergedAxis k = all.sum_is_empty ? MergedAxis{0} : take_matrix_dim(all.summed);
  if (all.sum_is_empty) all.summed.clear();

  Gemm gemm{{lhs.buffer, lhs.offset, m.lhs, k.lhs},
            {rhs.buffer, rhs.offset, k.rhs, n.rhs},
            {out.buffer, out.offset, m.out, n.out},
            m.size,
            n.size,
            k.size};
  gemm.accumulates = accumulates;
  if (has_bias && !accumulates) gemm.bias = Matrix{bias.buffer, bias.offset, m.bias, n.bias};
  if (scales && k.size > 0) {
    gemm.lhs_scale = Scale{scales->lhs.buffer, scales->lhs.offset, m.lhs_scale};
    gemm.rhs_scale = Scale{scales->rhs.buffer, scales->rhs.offset, n.rhs_scale};
  }
  std::vector<MergedAxis> outer = std::move(all.rows);
  outer.insert(outer.end(), all.columns.begin(), all.columns.end());
  take_batch(gemm, outer);
  emit_repeated(builder, gemm, outer, all.summed);
}

}  // namespace shardwright
