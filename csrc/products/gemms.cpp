#include "products/gemms.h"

#include <algorithm>
#include <optional>

namespace shardwright {
namespace {

// One axis, or several merged into one: its size, and its stride in each tensor.
struct Run {
  int64_t size = 1;
  int64_t lhs = 0;
  int64_t rhs = 0;
  int64_t out = 0;
  int64_t bias = 0;
  int64_t lhs_scale = 0;
  int64_t rhs_scale = 0;

  bool continues(const Run& inner) const {
    return lhs == inner.lhs * inner.size && rhs == inner.rhs * inner.size && out == inner.out * inner.size &&
           bias == inner.bias * inner.size && lhs_scale == inner.lhs_scale * inner.size &&
           rhs_scale == inner.rhs_scale * inner.size;
  }
};

// Merges axes, listed outermost first, that continue each other in every tensor. Axes of size 1 are dropped.
std::vector<Run> merged(const std::vector<Run>& axes) {
  std::vector<Run> runs;
  for (const Run& axis : axes) {
    if (axis.size == 1) continue;
    if (!runs.empty() && runs.back().continues(axis)) {
      const int64_t size = runs.back().size * axis.size;
      runs.back() = axis;
      runs.back().size = size;
    } else {
      runs.push_back(axis);
    }
  }
  return runs;
}

// Removes the innermost run from the list and returns it.
Run take_matrix_dim(std::vector<Run>& runs) {
  if (runs.empty()) return {};
  const Run inner = runs.back();
  runs.pop_back();
  return inner;
}

void shift(Gemm& gemm, const Run& run, int64_t by) {
  gemm.lhs.offset += by * run.lhs;
  gemm.rhs.offset += by * run.rhs;
  gemm.dst.offset += by * run.out;
  if (gemm.bias) gemm.bias->offset += by * run.bias;
  if (gemm.lhs_scale) gemm.lhs_scale->offset += by * run.lhs_scale;
  if (gemm.rhs_scale) gemm.rhs_scale->offset += by * run.rhs_scale;
}

// The difference between the offsets of two products of the same kind, matrix by matrix.
struct Distance {
  int64_t lhs = 0;
  int64_t rhs = 0;
  int64_t dst = 0;
  int64_t bias = 0;
  int64_t lhs_scale = 0;
  int64_t rhs_scale = 0;
};

bool is_equal(const Matrix& a, const Matrix& b) {
  return a.buffer == b.buffer && a.row_stride == b.row_stride && a.column_stride == b.column_stride;
}

bool is_equal(const std::optional<Scale>& a, const std::optional<Scale>& b) {
  return a.has_value() == b.has_value() && (!a || (a->buffer == b->buffer && a->stride == b->stride));
}

// Returns nullopt if the products differ in buffers, strides, k, bias or scales, or if `b` has a batch.
std::optional<Distance> distance_between(const Gemm& a, const Gemm& b) {
  if (!is_equal(a.lhs, b.lhs) || !is_equal(a.rhs, b.rhs) || !is_equal(a.dst, b.dst)) return std::nullopt;
  if (a.accumulates != b.accumulates || a.bias.has_value() != b.bias.has_value() || a.k != b.k || b.count != 1) {
    return std::nullopt;
  }
  if (a.bias && !is_equal(*a.bias, *b.bias)) return std::nullopt;
  if (!is_equal(a.lhs_scale, b.lhs_scale) || !is_equal(a.rhs_scale, b.rhs_scale)) return std::nullopt;
  return Distance{b.lhs.offset - a.lhs.offset,
                  b.rhs.offset - a.rhs.offset,
                  b.dst.offset - a.dst.offset,
                  a.bias ? b.bias->offset - a.bias->offset : 0,
                  a.lhs_scale ? b.lhs_scale->offset - a.lhs_scale->offset : 0,
                  a.rhs_scale ? b.rhs_scale->offset - a.rhs_scale->offset : 0};
}

int64_t stride_of(const std::optional<Scale>& scale) { return scale ? scale->stride : 0; }

// Merges `next` into `last` if possible and returns whether it did. Products that add to the same place stay separate.
bool try_merge(Gemm& last, const Gemm& next) {
  const std::optional<Distance> by = distance_between(last, next);
  if (!by || by->dst == 0) return false;
  const auto continues = [&](int64_t size, const Distance& stride) {
    return by->lhs == size * stride.lhs && by->rhs == size * stride.rhs && by->dst == size * stride.dst &&
           by->bias == size * stride.bias && by->lhs_scale == size * stride.lhs_scale &&
           by->rhs_scale == size * stride.rhs_scale;
  };
  const Distance row{last.lhs.row_stride,       0, last.dst.row_stride, last.bias ? last.bias->row_stride : 0,
                     stride_of(last.lhs_scale), 0};
  const Distance column{0, last.rhs.column_stride,   last.dst.column_stride, last.bias ? last.bias->column_stride : 0,
                        0, stride_of(last.rhs_scale)};
  if (last.count == 1 && last.n == next.n && continues(last.m, row)) {
    last.m += next.m;
    return true;
  }
  if (last.count == 1 && last.m == next.m && continues(last.n, column)) {
    last.n += next.n;
    return true;
  }
  // The entries of a batch run concurrently, so entries that accumulate could write to the same place.
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

void emit_merged(ProgramBuilder& builder, Gemm gemm) {
  if (Instruction* last = builder.last_of_chunk()) {
    if (auto* before = std::get_if<Gemm>(&last->operation); before != nullptr && try_merge(*before, gemm)) return;
  }
  builder.emit(std::move(gemm));
}

// The axes of a contraction by kind, merged where possible.
struct Axes {
  std::vector<Run> rows;     // free in lhs
  std::vector<Run> columns;  // free in rhs
  std::vector<Run> summed;
  bool has_no_result = false;  // an axis of the result has length 0
  bool sums_nothing = false;   // a summed axis has length 0
};

template <typename RunOf>
Axes axes_by_kind(const Contraction& axes, const std::vector<int64_t>& sizes, const RunOf& run_of) {
  Axes all;
  for (const int axis : axes.out) {
    all.has_no_result = all.has_no_result || sizes[axis] == 0;
    (has_axis(axes.lhs, axis) ? all.rows : all.columns).push_back(run_of(axis));
  }
  for (const int axis : axes.lhs) {
    if (!axes.is_summed(axis)) continue;
    all.summed.push_back(run_of(axis));
    all.sums_nothing = all.sums_nothing || sizes[axis] == 0;
  }
  all.rows = merged(all.rows);
  all.columns = merged(all.columns);
  all.summed = merged(all.summed);
  return all;
}

bool has_scale_stride(const Run& run) { return run.lhs_scale != 0 || run.rhs_scale != 0; }

// Makes the longest of the outer runs the batch of the product, if the product may have one.
void take_batch(Gemm& gemm, std::vector<Run>& outer) {
  const auto longest =
      std::max_element(outer.begin(), outer.end(), [](const Run& a, const Run& b) { return a.size < b.size; });
  if (longest == outer.end() || gemm.bias) return;
  if (stride_of(gemm.lhs_scale) != 0 || stride_of(gemm.rhs_scale) != 0 || has_scale_stride(*longest)) return;
  gemm.count = longest->size;
  gemm.lhs_batch_stride = longest->lhs;
  gemm.rhs_batch_stride = longest->rhs;
  gemm.dst_batch_stride = longest->out;
  outer.erase(longest);
}

// Emits the product at every place of the outer runs. Summed runs change fastest, so the first product that touches a
// part of the result writes it and the later ones accumulate.
void emit_repeated(ProgramBuilder& builder, const Gemm& gemm, const std::vector<Run>& free,
                   const std::vector<Run>& summed) {
  std::vector<Run> outer = free;
  outer.insert(outer.end(), summed.begin(), summed.end());
  std::vector<int64_t> at(outer.size(), 0);
  while (true) {
    Gemm product = gemm;
    bool is_first = true;
    for (size_t d = 0; d < outer.size(); ++d) {
      shift(product, outer[d], at[d]);
      if (d >= free.size() && at[d] > 0) is_first = false;
    }
    if (!is_first) {
      product.accumulates = true;
      product.bias.reset();
    }
    emit_merged(builder, std::move(product));
    size_t d = outer.size();
    while (d > 0 && ++at[d - 1] == outer[d - 1].size) at[--d] = 0;
    if (d == 0) return;
  }
}

}  // namespace

TensorView row_major_view(BufferId buffer, const std::vector<int>& dims, const std::vector<int64_t>& shape,
                          int num_axes) {
  TensorView view{buffer, 0, std::vector<int64_t>(num_axes, 0)};
  int64_t stride = 1;
  for (size_t d = dims.size(); d-- > 0;) {
    view.strides[dims[d]] = stride;
    stride *= shape[d];
  }
  return view;
}

TensorView scales_view(const Contraction& axes, const std::vector<int>& operand, BufferId buffer,
                       const std::vector<int64_t>& shape) {
  if (shape.empty()) return {buffer, 0, std::vector<int64_t>(axes.num_axes(), 0)};
  std::vector<int> rows;
  for (const int d : free_dims_of(axes, operand)) rows.push_back(operand[d]);
  return row_major_view(buffer, rows, shape, axes.num_axes());
}

void emit_gemms(ProgramBuilder& builder, const Contraction& axes, const std::vector<int64_t>& sizes,
                const TensorView& lhs, const TensorView& rhs, const TensorView& out, bool accumulates,
                const TensorView& bias, const std::optional<ScaleViews>& scales) {
  const bool has_bias = bias.buffer != kMissingBuffer;
  Axes all = axes_by_kind(axes, sizes, [&](int axis) {
    return Run{sizes[axis],
               lhs.strides[axis],
               rhs.strides[axis],
               out.strides[axis],
               has_bias ? bias.strides[axis] : 0,
               scales ? scales->lhs.strides[axis] : 0,
               scales ? scales->rhs.strides[axis] : 0};
  });
  if (all.has_no_result || (all.sums_nothing && accumulates)) return;
  const Run m = take_matrix_dim(all.rows);
  const Run n = take_matrix_dim(all.columns);
  const Run k = all.sums_nothing ? Run{0} : take_matrix_dim(all.summed);
  if (all.sums_nothing) all.summed.clear();

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
  std::vector<Run> outer = std::move(all.rows);
  outer.insert(outer.end(), all.columns.begin(), all.columns.end());
  take_batch(gemm, outer);
  emit_repeated(builder, gemm, outer, all.summed);
}

}  // namespace shardwright
