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
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "program/attend_tiles.h"
#include "support/ceil_divide.h"

namespace shardwright {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A range of rows of each head.
struct RowRange {
  int64_t heads = 0;  // number of heads: all query heads, or all heads of keys and values
  int64_t first_row = 0;
  int64_t rows = 0;
};

// Returns the range of all rows of all query heads.
RowRange all_rows(const AttendSizes& s) { return {s.heads, 0, s.rows}; }

// Returns a view of queries, keys, values or results: [batch, heads, rows, depth].
at::Tensor heads_view(const Heads& heads, const Buffers& buffers, int64_t batch, const RowRange& range, int64_t depth) {
  const at::Tensor& buffer = buffers[heads.buffer];
  return buffer.as_strided({batch, range.heads, range.rows, depth},
                           {heads.batch_stride, heads.head_stride, heads.row_stride, 1},
                           buffer.storage_offset() + heads.offset + range.first_row * heads.row_stride);
}

// Returns a view of the lse of some rows: [batch, heads, rows].
at::Tensor lse_view(const HeadRows& lse, const Buffers& buffers, const AttendSizes& s, int64_t first_row,
                    int64_t rows) {
  const at::Tensor& buffer = buffers[lse.buffer];
  return buffer.as_strided({s.batch, s.heads, rows}, {lse.batch_stride, lse.head_stride, 1},
                           buffer.storage_offset() + lse.offset + first_row);
}

// Returns a tensor [batch, heads, rows, depth], padded with zeros to this depth.
at::Tensor pad_depth(const at::Tensor& tensor, int64_t depth) {
  const int64_t missing = depth - tensor.size(3);
  return missing == 0 ? tensor : at::constant_pad_nd(tensor, {0, missing}, 0);
}

// Returns a view of the first `depth` elements of each row.
at::Tensor without_padding(const at::Tensor& tensor, int64_t depth) {
  return tensor.size(3) == depth ? tensor : tensor.narrow(3, 0, depth);
}

// Returns a view of the part of a mask for a tile: [batch, heads, rows, columns], with one element in dims in which the
// mask is broadcast.
at::Tensor mask_view(const PairMask& mask, const Buffers& buffers, const AttendSizes& s, const VisiblePart& part) {
  const auto size = [](int64_t stride, int64_t all) { return stride == 0 ? 1 : all; };
  const at::Tensor& buffer = buffers[mask.buffer];
  const int64_t first = part.first_row * mask.row_stride + part.first_column * mask.column_stride;
  return buffer.as_strided({size(mask.batch_stride, s.batch), size(mask.head_stride, s.heads),
                            size(mask.row_stride, part.rows), part.columns},
                           {mask.batch_stride, mask.head_stride, mask.row_stride, mask.column_stride},
                           buffer.storage_offset() + mask.offset + first);
}

// The bias that is added to the scores of a product: minus infinity where a query does not see a key. Its shape is
// [rows, columns] or [batch, heads, rows, columns], with one element in dims in which it is broadcast.
struct Bias {
  at::Tensor values;
  // For masks, else undefined: a boolean tensor [..., rows, 1], true for rows that see no key. Kernels would return NaN
  // for a row of minus infinity, so these rows have a bias of 0, and their results are overwritten.
  at::Tensor rows_without_keys;
};

// Returns a tensor of these sizes whose rows begin at multiples of kBiasAlignment elements.
at::Tensor empty_bias(at::IntArrayRef sizes, const at::TensorOptions& options) {
  std::vector<int64_t> aligned = sizes.vec();
  aligned.back() = (aligned.back() + kBiasAlignment - 1) / kBiasAlignment * kBiasAlignment;
  return at::empty(aligned, options).narrow(-1, 0, sizes.back());
}

// Returns a bias [rows, columns]: 0 where the query of the row sees the key of the column, else minus infinity.
Bias bias_of_band(const Band& band, int64_t rows, int64_t columns, const at::TensorOptions& options) {
  // Row i sees columns from i - most to i - least.
  at::Tensor bias = empty_bias({rows, columns}, options).fill_(-kInfinity);
  bias.triu_(std::clamp(1 - band.least, -rows, columns));
  if (band.most < rows - 1) {
    bias.add_(at::full({rows, columns}, -kInfinity, options).tril_(std::clamp(-band.most - 1, -rows, columns)));
  }
  return {bias, {}};
}

// True for float16 and bfloat16.
bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// Returns the bias for a mask: 0 and minus infinity for a boolean mask, else a copy of the mask. `options` are those of
// the queries. The kernels on CPU take a float32 bias for half precision, but compute wrong results for float64.
Bias bias_of_mask(const at::Tensor& mask, const at::TensorOptions& options) {
  const bool is_half_on_cpu = options.device().is_cpu() && is_half(c10::typeMetaToScalarType(options.dtype()));
  const bool stays_float32 = mask.scalar_type() == at::kFloat && is_half_on_cpu;
  at::Tensor bias = empty_bias(mask.sizes(), stays_float32 ? options.dtype(at::kFloat) : options);
  if (mask.scalar_type() == at::kBool) {
    bias.fill_(-kInfinity).masked_fill_(mask, 0);
  } else {
    bias.copy_(mask);
  }
  at::Tensor rows_without_keys = bias.amax(-1, /*keepdim=*/true).eq(-kInfinity);
  bias.masked_fill_(rows_without_keys, 0);
  return {bias, rows_without_keys};
}

// One tile of a product, in the form that kernels use.
struct Operands {
  // True if the kernel applies the triangle itself (its argument `is_causal`).
  bool is_causal() const { return !bias && shape == BlockShape::kTriangle; }

  // True if flash attention on CUDA supports this tile (attend.h).
  bool fits_flash() const {
    const int64_t depth = q.size(3);
    return is_half(q.scalar_type()) && !bias && depth == v.size(3) && depth % 8 == 0 && depth <= 256;
  }
  // Returns the bias, not expanded.
  std::optional<at::Tensor> bias_values() const { return bias ? std::optional(bias->values) : std::nullopt; }
  // Returns the bias as a view [batch, heads, rows, columns], for kernels that do not broadcast.
  std::optional<at::Tensor> expanded_bias() const {
    if (!bias) return std::nullopt;
    return bias->values.expand({q.size(0), q.size(1), q.size(2), k.size(2)});
  }

  at::Tensor q, k, v;        // [batch, heads, rows or columns, depth]
  BlockShape shape;          // full, a triangle or another set of visible pairs
  std::optional<Bias> bias;  // set for masks, and for shapes that are neither full nor a triangle
  int64_t heads_per_kv;      // query heads per head of keys and values
  double scale;              // factor of the scores
};

// Returns the bytes per element of operands and bias, which determine the sizes of tiles. The bias of a float32 mask
// counts as float32, because on CPU it is (bias_of_mask).
AttendItemBytes element_sizes_of(const at::Tensor& operand, const std::optional<PairMask>& mask,
                                 const Buffers& buffers) {
  const int64_t bytes = operand.element_size();
  const bool is_in_float32 = mask && buffers[mask->buffer].scalar_type() == at::kFloat;
  return {bytes, is_in_float32 ? std::max<int64_t>(bytes, 4) : bytes};
}

// The tiles of a product. Each is a range of rows with the columns that these rows see, small enough for its bias
// (program/attend_tiles.h). Operands are views, or padded copies if the kernel needs equal depths. `Product` is
// Attend or AttendBackward.
template <typename Product>
class Tiles {
 public:
  Tiles(const Product& product, const Buffers& buffers) : o_(product), buffers_(buffers) {
    const AttendSizes& s = o_.sizes;
    q_ = heads_view(o_.q, buffers, s.batch, {s.heads, 0, s.rows}, s.depth);
    k_ = heads_view(o_.k, buffers, s.batch, {s.kv_heads, 0, s.columns}, s.depth);
    v_ = heads_view(o_.v, buffers, s.batch, {s.kv_heads, 0, s.columns}, s.value_depth);
    tiles_ = tiles_of(o_, element_sizes_of(q_, o_.mask, buffers));
    const int64_t deepest = std::max(s.depth, s.value_depth);
    const bool allows_unequal_depths = q_.is_cuda() && !uses_flash(deepest);
    const int64_t depth = padded_depth(allows_unequal_depths ? s.depth : deepest);
    q_ = pad_depth(q_, depth);
    k_ = pad_depth(k_, depth);
    v_ = pad_depth(v_, allows_unequal_depths ? padded_depth(s.value_depth) : depth);
  }

  const std::vector<VisiblePart>& tiles() const { return tiles_; }

  // Returns the operands of a tile, with the bias if it needs one.
  Operands at(const VisiblePart& tile) const {
    Operands operands;
    operands.q = q_.narrow(2, tile.first_row, tile.rows);
    operands.k = k_.narrow(2, tile.first_column, tile.columns);
    operands.v = v_.narrow(2, tile.first_column, tile.columns);
    operands.shape = shape_of(tile.band, tile.rows, tile.columns);
    operands.heads_per_kv = o_.sizes.heads / o_.sizes.kv_heads;
    operands.scale = o_.scale;
    if (o_.mask) {
      operands.bias = bias_of_mask(mask_view(*o_.mask, buffers_, o_.sizes, tile), q_.options());
    } else if (operands.shape == BlockShape::kOther) {
      operands.bias = bias_of_band(tile.band, tile.rows, tile.columns, q_.options());
    }
    return operands;
  }

  // Returns the tile's rows of the result or of its gradient, padded to the depth of the kernel's values.
  at::Tensor result(const Heads& heads, const VisiblePart& tile) const {
    const AttendSizes& s = o_.sizes;
    return pad_depth(heads_view(heads, buffers_, s.batch, {s.heads, tile.first_row, tile.rows}, s.value_depth),
                     v_.size(3));
  }

 private:
  // Returns the depth in elements, on devices rounded up to a multiple of 16 bytes, which kernels load at once.
  int64_t padded_depth(int64_t depth) const {
    if (q_.is_cpu()) return depth;
    const int64_t items = 16 / q_.element_size();
    return ceil_divide(depth, items) * items;
  }
  // True if flash attention may compute tiles, so that keys and values must have one depth. `depth` is the larger one.
  bool uses_flash(int64_t depth) const { return is_half(q_.scalar_type()) && !o_.mask && padded_depth(depth) <= 256; }

  const Product& o_;
  const Buffers& buffers_;
  at::Tensor q_, k_, v_;
  std::vector<VisiblePart> tiles_;
};

// Returns keys or values in which each head is repeated `times` times, once for each head of queries that shares it.
at::Tensor repeat_heads(const at::Tensor& keys, int64_t times) {
  if (times == 1) return keys;
  return keys.unsqueeze(2).expand({-1, -1, times, -1, -1}).reshape({keys.size(0), -1, keys.size(2), keys.size(3)});
}

// Returns the gradient of the argument of repeat_heads: the sums of every `times` consecutive heads, in float32.
at::Tensor sum_repeated_heads(const at::Tensor& gradient, int64_t times) {
  if (times == 1) return gradient;
  return gradient.unflatten(1, {-1, times}).to(at::kFloat).sum(2);
}

// Returns an lse [batch, heads, rows], padded with infinity to a multiple of 32 rows, as memory-efficient attention
// requires.
at::Tensor pad_lse(const at::Tensor& lse) {
  const int64_t rows = lse.size(2);
  at::Tensor padded = at::full({lse.size(0), lse.size(1), (rows + 31) / 32 * 32}, kInfinity, lse.options());
  padded.narrow(2, 0, rows).copy_(lse);
  return padded;
}

// Returns a copy of a result with the memory order [batch, rows, heads, depth]. The backward of memory-efficient
// attention supports only this order.
at::Tensor rows_before_heads(const at::Tensor& out) { return out.transpose(1, 2).contiguous().transpose(1, 2); }

// Returns the result and the lse of a tile, computed by the device's kernel (attend.h).
std::tuple<at::Tensor, at::Tensor> forward(const Operands& o) {
  if (o.q.is_cpu()) {
    return at::_scaled_dot_product_flash_attention_for_cpu(o.q, o.k, o.v, 0.0, o.is_causal(), o.bias_values(), o.scale);
  }
  if (!o.q.is_cuda()) {
    const auto results = at::_scaled_dot_product_fused_attention_overrideable(o.q, repeat_heads(o.k, o.heads_per_kv),
                                                                              repeat_heads(o.v, o.heads_per_kv),
                                                                              o.expanded_bias(), 0.0, o.is_causal(),
                                                                              /*return_debug_mask=*/false, o.scale);
    return {std::get<0>(results), std::get<1>(results)};
  }
  if (o.fits_flash()) {
    auto results = at::_scaled_dot_product_flash_attention(o.q, o.k, o.v, 0.0, o.is_causal(), false, o.scale);
    return {std::get<0>(results), std::get<1>(results)};
  }
  auto results = at::_scaled_dot_product_efficient_attention(o.q, repeat_heads(o.k, o.heads_per_kv),
                                                             repeat_heads(o.v, o.heads_per_kv), o.expanded_bias(),
                                                             /*compute_log_sumexp=*/true, 0.0, o.is_causal(), o.scale);
  return {std::get<0>(results), std::get<1>(results).narrow(2, 0, o.q.size(2))};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of q, k and v

// Returns the gradients of a tile. `out` and `lse` are the result over all keys, not only over this tile.
Gradients backward(const Operands& o, const at::Tensor& dout, const at::Tensor& out, const at::Tensor& lse) {
  if (o.q.is_cpu()) {
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(dout, o.q, o.k, o.v, out, lse, 0.0, o.is_causal(),
                                                                    o.bias_values(), o.scale);
  }
  const std::optional<at::Tensor> bias = o.expanded_bias();
  if (!o.q.is_cuda()) {
    const at::Tensor none;
    const auto [dq, dk, dv, dbias] = at::_scaled_dot_product_fused_attention_overrideable_backward(
        dout, o.q, repeat_heads(o.k, o.heads_per_kv), repeat_heads(o.v, o.heads_per_kv), bias.value_or(none),
        {true, true, true, false}, out, lse, none, none, o.q.size(2), o.k.size(2), 0.0, o.is_causal(), none, none,
        o.scale);
    return {dq, sum_repeated_heads(dk, o.heads_per_kv), sum_repeated_heads(dv, o.heads_per_kv)};
  }
  const at::Tensor seed = at::zeros({}, o.q.options().dtype(at::kLong));
  if (o.fits_flash()) {
    return at::_scaled_dot_product_flash_attention_backward(dout, o.q, o.k, o.v, out, lse.contiguous(), at::Tensor(),
                                                            at::Tensor(), o.q.size(2), o.k.size(2), 0.0, o.is_causal(),
                                                            seed, seed, o.scale);
  }
  auto [dq, dk, dv, dbias] = at::_scaled_dot_product_efficient_attention_backward(
      dout, o.q, repeat_heads(o.k, o.heads_per_kv), repeat_heads(o.v, o.heads_per_kv), bias.value_or(at::Tensor()),
      rows_before_heads(out), pad_lse(lse), seed, seed, 0.0, {true, true, true, false}, o.is_causal(), o.scale);
  return {dq, sum_repeated_heads(dk, o.heads_per_kv), sum_repeated_heads(dv, o.heads_per_kv)};
}

// Gives the addresses of the rows of a partial result in CPU memory.
template <typename T>
struct Rows {
  Rows(const Partial& partial, const Buffers& buffers)
      : out(buffers[partial.out.buffer].data_ptr<T>() + partial.out.offset),
        lse(buffers[partial.lse.buffer].data_ptr<T>() + partial.lse.offset),
        partial(partial) {}

  // Return the addresses of the output and of the lse of a row, given by batch, head and row.
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

// out = (left_out * left_weight + right_out * right_weight) / total, and lse = max_lse + log(total), where
// left_weight = exp(left_lse - max_lse), likewise for right, total = left_weight + right_weight, and max_lse is the
// larger lse, so that no exponential overflows.
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
      T& left_lse = *left.lse_at(b, h, row);
      const T right_lse = *right.lse_at(b, h, row);
      const T max_lse = std::max(left_lse, right_lse);
      if (std::isinf(max_lse) && max_lse < 0) continue;  // neither side sees a key
      const T left_weight = std::exp(left_lse - max_lse);
      const T right_weight = std::exp(right_lse - max_lse);
      const T total = left_weight + right_weight;
      T* to = left.out_at(b, h, row);
      const T* from = right.out_at(b, h, row);
      for (int64_t d = 0; d < s.value_depth; ++d) to[d] = (to[d] * left_weight + from[d] * right_weight) / total;
      left_lse = max_lse + std::log(total);
    }
  });
}

// Like merge_on_cpu. Where neither side sees a key, the exponentials are 0 and the divisor is a tiny positive number.
void merge_with_aten(const Merge& o, const Buffers& buffers) {
  const AttendSizes& s = o.sizes;
  at::Tensor left_lse = lse_view(o.left.lse, buffers, s, 0, s.rows);
  const at::Tensor right_lse = lse_view(o.right.lse, buffers, s, 0, s.rows);
  at::Tensor max_lse = left_lse.maximum(right_lse);
  max_lse.masked_fill_(max_lse.eq(-kInfinity), 0);
  const at::Tensor left_weight = left_lse.sub(max_lse).exp_();
  const at::Tensor right_weight = right_lse.sub(max_lse).exp_();
  const at::Tensor total = left_weight.add(right_weight);
  const at::Tensor divisor = total.clamp_min(std::numeric_limits<float>::min()).unsqueeze(-1);
  at::Tensor out = heads_view(o.left.out, buffers, s.batch, all_rows(s), s.value_depth);
  const at::Tensor right_out = heads_view(o.right.out, buffers, s.batch, all_rows(s), s.value_depth);
  out.mul_(left_weight.unsqueeze(-1)).addcmul_(right_out, right_weight.unsqueeze(-1));
  out.div_(divisor);
  left_lse.copy_(total.log().add_(max_lse));
}

}  // namespace

void attend(const Attend& o, const Buffers& buffers) {
  const AttendSizes& s = o.sizes;
  at::Tensor out = heads_view(o.result.out, buffers, s.batch, all_rows(s), s.value_depth);
  at::Tensor lse = lse_view(o.result.lse, buffers, s, 0, s.rows);
  const std::optional<VisiblePart> part = visible_part(o.band, s.rows, s.columns);
  if (!part || part->rows < s.rows) {
    out.zero_();
    lse.fill_(-kInfinity);
  }
  if (!part || s.batch * s.heads == 0) return;
  const Tiles<Attend> product(o, buffers);
  for (const VisiblePart& tile : product.tiles()) {
    const Operands operands = product.at(tile);
    const auto [padded_out, tile_lse] = forward(operands);
    at::Tensor rows = out.narrow(2, tile.first_row, tile.rows).copy_(without_padding(padded_out, s.value_depth));
    at::Tensor lse_of_rows = lse.narrow(2, tile.first_row, tile.rows).copy_(tile_lse);
    if (!operands.bias || !operands.bias->rows_without_keys.defined()) continue;
    rows.masked_fill_(operands.bias->rows_without_keys, 0);
    lse_of_rows.masked_fill_(operands.bias->rows_without_keys.squeeze(-1), -kInfinity);
  }
}

void attend_backward(const AttendBackward& o, const Buffers& buffers) {
  const AttendSizes& s = o.sizes;
  if (!visible_part(o.band, s.rows, s.columns) || s.batch * s.heads == 0) return;
  const Tiles<AttendBackward> product(o, buffers);
  for (const VisiblePart& tile : product.tiles()) {
    const Operands operands = product.at(tile);
    at::Tensor lse = lse_view(o.lse, buffers, s, tile.first_row, tile.rows);
    // A weight is exp(score - lse), so an lse of infinity gives rows without keys weights of 0.
    if (operands.bias && operands.bias->rows_without_keys.defined()) {
      lse = lse.masked_fill(operands.bias->rows_without_keys.squeeze(-1), kInfinity);
    }
    const auto [dq, dk, dv] = backward(operands, product.result(o.dout, tile), product.result(o.out, tile), lse);
    const RowRange of_queries{s.heads, tile.first_row, tile.rows};
    const RowRange of_keys{s.kv_heads, tile.first_column, tile.columns};
    heads_view(o.dq, buffers, s.batch, of_queries, s.depth).add_(without_padding(dq, s.depth));
    heads_view(o.dk, buffers, s.batch, of_keys, s.depth).add_(without_padding(dk, s.depth));
    heads_view(o.dv, buffers, s.batch, of_keys, s.value_depth).add_(without_padding(dv, s.value_depth));
  }
}

void merge(const Merge& o, const Buffers& buffers) {
  const at::Tensor& left = buffers[o.left.out.buffer];
  if (!left.is_cpu()) return merge_with_aten(o, buffers);
  left.scalar_type() == at::kDouble ? merge_on_cpu<double>(o, buffers) : merge_on_cpu<float>(o, buffers);
}

void accumulate(const Accumulate& o, const Buffers& buffers) {
  const AttendSizes& s = o.sizes;
  heads_view(o.dst, buffers, s.batch, all_rows(s), s.depth)
      .add_(heads_view(o.src, buffers, s.batch, all_rows(s), s.depth));
}

}  // namespace shardwright
