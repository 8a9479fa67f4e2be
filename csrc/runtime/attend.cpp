#include "runtime/attend.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/_scaled_dot_product_fused_attention_overrideable.h>
#include <ATen/ops/_scaled_dot_product_fused_attention_overrideable_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <tuple>

namespace shardwright {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor view(const Heads& heads, const Buffers& buffers, const AttendSizes& s, int64_t num_heads, int64_t first_row,
                int64_t rows) {
  const at::Tensor& buffer = buffers[heads.buffer];
  return buffer.as_strided({s.batch, num_heads, rows, s.depth},
                           {heads.batch_stride, heads.head_stride, heads.row_stride, 1},
                           buffer.storage_offset() + heads.offset + first_row * heads.row_stride);
}

at::Tensor view(const HeadRows& lse, const Buffers& buffers, const AttendSizes& s, int64_t first_row, int64_t rows) {
  const at::Tensor& buffer = buffers[lse.buffer];
  return buffer.as_strided({s.batch, s.heads, rows}, {lse.batch_stride, lse.head_stride, 1},
                           buffer.storage_offset() + lse.offset + first_row);
}

// A block product as the kernels take it: views of what sees something.
struct Operands {
  template <typename Product>
  Operands(const Product& o, const Buffers& buffers, const VisiblePart& part)
      : q(view(o.q, buffers, o.sizes, o.sizes.heads, part.first_row, part.rows)),
        k(view(o.k, buffers, o.sizes, o.sizes.kv_heads, part.first_column, part.columns)),
        v(view(o.v, buffers, o.sizes, o.sizes.kv_heads, part.first_column, part.columns)),
        band(part.band),
        shape(shape_of(part.band, part.rows, part.columns)),
        per_kv(o.sizes.heads / o.sizes.kv_heads),
        scale(o.scale) {}

  bool is_causal() const { return shape == BlockShape::kTriangle; }

  // Minus infinity where a query does not see a key, else 0. Rows begin at multiples of 16 elements, as kernels on CUDA
  // require.
  at::Tensor bias() const {
    const int64_t rows = q.size(2);
    const int64_t columns = k.size(2);
    const auto whole = q.options().dtype(at::kLong);
    const at::Tensor difference = at::arange(rows, whole).unsqueeze(1).sub(at::arange(columns, whole));
    at::Tensor bias = at::zeros({rows, (columns + 15) / 16 * 16}, q.options()).narrow(1, 0, columns);
    bias.masked_fill_(difference.lt(band.least).logical_or(difference.gt(band.most)), -kInfinity);
    return bias;
  }

  at::Tensor q, k, v;
  Band band;
  BlockShape shape;
  int64_t per_kv;
  double scale;
};

std::optional<at::Tensor> mask_of(const Operands& o) {
  return o.shape == BlockShape::kOther ? std::optional(o.bias()) : std::nullopt;
}

bool is_for_flash(const Operands& o) {
  const int64_t depth = o.q.size(3);
  const bool is_half = o.q.scalar_type() == at::kHalf || o.q.scalar_type() == at::kBFloat16;
  return is_half && o.shape != BlockShape::kOther && depth % 8 == 0 && depth <= 256;
}

// Heads of keys once for each head of queries.
at::Tensor repeated(const at::Tensor& keys, int64_t times) {
  if (times == 1) return keys;
  return keys.unsqueeze(2).expand({-1, -1, times, -1, -1}).reshape({keys.size(0), -1, keys.size(2), keys.size(3)});
}

at::Tensor summed(const at::Tensor& gradient, int64_t times) {
  if (times == 1) return gradient;
  return gradient.unflatten(1, {-1, times}).to(at::kFloat).sum(2);
}

std::optional<at::Tensor> expanded_bias(const Operands& o) {
  if (o.shape != BlockShape::kOther) return std::nullopt;
  return o.bias().expand({o.q.size(0), o.q.size(1), -1, -1});
}

// The kernels take and give an lse whose rows are padded to multiples of 32.
at::Tensor padded_lse(const at::Tensor& lse) {
  const int64_t rows = lse.size(2);
  at::Tensor padded = at::full({lse.size(0), lse.size(1), (rows + 31) / 32 * 32}, kInfinity, lse.options());
  padded.narrow(2, 0, rows).copy_(lse);
  return padded;
}

std::tuple<at::Tensor, at::Tensor> forward(const Operands& o) {
  if (o.q.is_cpu()) {
    return at::_scaled_dot_product_flash_attention_for_cpu(o.q, o.k, o.v, 0.0, o.is_causal(), mask_of(o), o.scale);
  }
  if (!o.q.is_cuda()) {
    const auto made = at::_scaled_dot_product_fused_attention_overrideable(
        o.q, repeated(o.k, o.per_kv), repeated(o.v, o.per_kv), expanded_bias(o), 0.0, o.is_causal(),
        /*return_debug_mask=*/false, o.scale);
    return {std::get<0>(made), std::get<1>(made)};
  }
  if (is_for_flash(o)) {
    auto made = at::_scaled_dot_product_flash_attention(o.q, o.k, o.v, 0.0, o.is_causal(), false, o.scale);
    return {std::get<0>(made), std::get<1>(made)};
  }
  auto made = at::_scaled_dot_product_efficient_attention(o.q, repeated(o.k, o.per_kv), repeated(o.v, o.per_kv),
                                                          expanded_bias(o), /*compute_log_sumexp=*/true, 0.0,
                                                          o.is_causal(), o.scale);
  return {std::get<0>(made), std::get<1>(made).narrow(2, 0, o.q.size(2))};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Gradients backward(const Operands& o, const at::Tensor& dout, const at::Tensor& out, const at::Tensor& lse) {
  if (o.q.is_cpu()) {
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(dout, o.q, o.k, o.v, out, lse, 0.0, o.is_causal(),
                                                                    mask_of(o), o.scale);
  }
  const std::optional<at::Tensor> bias = expanded_bias(o);
  if (!o.q.is_cuda()) {
    const at::Tensor none;
    const auto [dq, dk, dv, dbias] = at::_scaled_dot_product_fused_attention_overrideable_backward(
        dout, o.q, repeated(o.k, o.per_kv), repeated(o.v, o.per_kv), bias.value_or(none), {true, true, true, false},
        out, lse, none, none, o.q.size(2), o.k.size(2), 0.0, o.is_causal(), none, none, o.scale);
    return {dq, summed(dk, o.per_kv), summed(dv, o.per_kv)};
  }
  const at::Tensor seed = at::zeros({}, o.q.options().dtype(at::kLong));
  if (is_for_flash(o)) {
    return at::_scaled_dot_product_flash_attention_backward(dout, o.q, o.k, o.v, out, lse.contiguous(), at::Tensor(),
                                                            at::Tensor(), o.q.size(2), o.k.size(2), 0.0, o.is_causal(),
                                                            seed, seed, o.scale);
  }
  auto [dq, dk, dv, dbias] = at::_scaled_dot_product_efficient_attention_backward(
      dout, o.q, repeated(o.k, o.per_kv), repeated(o.v, o.per_kv), bias.value_or(at::Tensor()), out, padded_lse(lse),
      seed, seed, 0.0, {true, true, true, false}, o.is_causal(), o.scale);
  return {dq, summed(dk, o.per_kv), summed(dv, o.per_kv)};
}

// Rows of a partial result that a loop on CPU goes through.
template <typename T>
struct Rows {
  Rows(const Partial& partial, const Buffers& buffers)
      : out(buffers[partial.out.buffer].data_ptr<T>() + partial.out.offset),
        lse(buffers[partial.lse.buffer].data_ptr<T>() + partial.lse.offset),
        partial(partial) {}

  T* out_at(int64_t b, int64_t h, int64_t row) const {
    return out + b * partial.out.batch_stride + h * partial.out.head_stride + row * partial.out.row_stride;
  }
  T* lse_at(int64_t b, int64_t h, int64_t row) const {
    return lse + b * partial.lse.batch_stride + h * partial.lse.head_stride + row;
  }

  T* out;
  T* lse;
  const Partial& partial;
};

template <typename T>
void merge_on_cpu(const Merge& o, const Buffers& buffers) {
  const Rows<T> left(o.left, buffers);
  const Rows<T> right(o.right, buffers);
  const AttendSizes& s = o.sizes;
  constexpr int64_t kRowsPerTask = 64;
  at::parallel_for(0, s.batch * s.heads * s.rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i % s.rows;
      const int64_t h = i / s.rows % s.heads;
      const int64_t b = i / s.rows / s.heads;
      T& sum = *left.lse_at(b, h, row);
      const T other = *right.lse_at(b, h, row);
      const T most = std::max(sum, other);
      if (std::isinf(most) && most < 0) continue;  // neither side sees anything
      const T mine = std::exp(sum - most);
      const T theirs = std::exp(other - most);
      const T total = mine + theirs;
      T* to = left.out_at(b, h, row);
      const T* from = right.out_at(b, h, row);
      for (int64_t d = 0; d < s.depth; ++d) to[d] = (to[d] * mine + from[d] * theirs) / total;
      sum = most + std::log(total);
    }
  });
}

void merge_with_aten(const Merge& o, const Buffers& buffers) {
  const AttendSizes& s = o.sizes;
  at::Tensor left = view(o.left.lse, buffers, s, 0, s.rows);
  const at::Tensor right = view(o.right.lse, buffers, s, 0, s.rows);
  at::Tensor most = left.maximum(right);
  most.masked_fill_(most.eq(-kInfinity), 0);
  const at::Tensor mine = left.sub(most).exp_();
  const at::Tensor theirs = right.sub(most).exp_();
  const at::Tensor total = mine.add(theirs);
  const at::Tensor divisor = total.clamp_min(std::numeric_limits<float>::min()).unsqueeze(-1);
  at::Tensor out = view(o.left.out, buffers, s, s.heads, 0, s.rows);
  out.mul_(mine.unsqueeze(-1)).addcmul_(view(o.right.out, buffers, s, s.heads, 0, s.rows), theirs.unsqueeze(-1));
  out.div_(divisor);
  left.copy_(total.log().add_(most));
}

}  // namespace

void attend(const Attend& o, const Buffers& buffers) {
  const AttendSizes& s = o.sizes;
  at::Tensor out = view(o.result.out, buffers, s, s.heads, 0, s.rows);
  at::Tensor lse = view(o.result.lse, buffers, s, 0, s.rows);
  const std::optional<VisiblePart> part = visible_part(o.band, s.rows, s.columns);
  if (!part || part->rows < s.rows) {
    out.zero_();
    lse.fill_(-kInfinity);
  }
  if (!part || s.batch * s.heads == 0) return;
  const auto [made, sums] = forward(Operands(o, buffers, *part));
  out.narrow(2, part->first_row, part->rows).copy_(made);
  lse.narrow(2, part->first_row, part->rows).copy_(sums);
}

void attend_backward(const AttendBackward& o, const Buffers& buffers) {
  const AttendSizes& s = o.sizes;
  const std::optional<VisiblePart> part = visible_part(o.band, s.rows, s.columns);
  if (!part || s.batch * s.heads == 0) return;
  const auto rows_of = [&](const Heads& heads) {
    return view(heads, buffers, s, s.heads, part->first_row, part->rows);
  };
  const auto columns_of = [&](const Heads& heads) {
    return view(heads, buffers, s, s.kv_heads, part->first_column, part->columns);
  };
  const auto [dq, dk, dv] = backward(Operands(o, buffers, *part), rows_of(o.dout), rows_of(o.out),
                                     view(o.lse, buffers, s, part->first_row, part->rows));
  rows_of(o.dq).add_(dq);
  columns_of(o.dk).add_(dk);
  columns_of(o.dv).add_(dv);
}

void merge(const Merge& o, const Buffers& buffers) {
  const at::Tensor& left = buffers[o.left.out.buffer];
  if (!left.is_cpu()) return merge_with_aten(o, buffers);
  left.scalar_type() == at::kDouble ? merge_on_cpu<double>(o, buffers) : merge_on_cpu<float>(o, buffers);
}

void accumulate(const Accumulate& o, const Buffers& buffers) {
  const AttendSizes& s = o.sizes;
  view(o.dst, buffers, s, s.heads, 0, s.rows).add_(view(o.src, buffers, s, s.heads, 0, s.rows));
}

}  // namespace shardwright
