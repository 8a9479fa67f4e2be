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

// A range of rows of all query heads, or of all key and value heads.
struct RowsOfHeads {
  int64_t heads = 0;
  int64_t first_row = 0;
  int64_t rows = 0;
};

// Returns all query rows.
RowsOfHeads all_rows(const AttendSizes& s) { return {s.heads, 0, s.rows}; }

// Returns a view of queries, keys, values or results: [batch, heads, rows, depth].
at::Tensor view(const Heads& heads, const Buffers& buffers, int64_t batch, const RowsOfHeads& of, int64_t depth) {
  const at::Tensor& buffer = buffers[heads.buffer];
  return buffer.as_strided({batch, of.heads, of.rows, depth},
                           {heads.batch_stride, heads.head_stride, heads.row_stride, 1},
                           buffer.storage_offset() + heads.offset + of.first_row * heads.row_stride);
}

// Returns a view of the lse of some rows: [batch, heads, rows].
at::Tensor view(const HeadRows& lse, const Buffers& buffers, const AttendSizes& s, int64_t first_row, int64_t rows) {
  const at::Tensor& buffer = buffers[lse.buffer];
  return buffer.as_strided({s.batch, s.heads, rows}, {lse.batch_stride, lse.head_stride, 1},
                           buffer.storage_offset() + lse.offset + first_row);
}

// Pads the last dim of [batch, heads, rows, depth] with zeros to this depth.
at::Tensor padded(const at::Tensor& tensor, int64_t depth) {
  const int64_t missing = depth - tensor.size(3);
  return missing == 0 ? tensor : at::constant_pad_nd(tensor, {0, missing}, 0);
}

// Returns the first `depth` elements of each row.
at::Tensor without_padding(const at::Tensor& tensor, int64_t depth) {
  return tensor.size(3) == depth ? tensor : tensor.narrow(3, 0, depth);
}

// Returns a view of the mask of some rows and columns: [batch, heads, rows, columns], with one element in dims that
// repeat.
at::Tensor view(const PairMask& mask, const Buffers& buffers, const AttendSizes& s, const VisiblePart& part) {
  const auto size = [](int64_t stride, int64_t all) { return stride == 0 ? 1 : all; };
  const at::Tensor& buffer = buffers[mask.buffer];
  const int64_t first = part.first_row * mask.row_stride + part.first_column * mask.column_stride;
  return buffer.as_strided({size(mask.batch_stride, s.batch), size(mask.head_stride, s.heads),
                            size(mask.row_stride, part.rows), part.columns},
                           {mask.batch_stride, mask.head_stride, mask.row_stride, mask.column_stride},
                           buffer.storage_offset() + mask.offset + first);
}

// The bias that is added to the scores of a product: minus infinity where a query does not see a key. Its shape is
// [rows, columns] or [batch, heads, rows, columns], with one element in dims that repeat.
struct Bias {
  at::Tensor added;
  at::Tensor blind;  // masks only: rows that see no key; they get a bias of 0 instead
};

// Returns a tensor of these sizes whose rows begin at multiples of kBiasAlignment elements.
at::Tensor empty_bias(at::IntArrayRef sizes, const at::TensorOptions& options) {
  std::vector<int64_t> aligned = sizes.vec();
  aligned.back() = (aligned.back() + kBiasAlignment - 1) / kBiasAlignment * kBiasAlignment;
  return at::empty(aligned, options).narrow(-1, 0, sizes.back());
}

// Returns a bias [rows, columns] of 0 where the band lets a query see a key, else minus infinity.
Bias bias_of_band(const Band& band, int64_t rows, int64_t columns, const at::TensorOptions& options) {
  // Row i sees columns from i - most to i - least.
  at::Tensor bias = empty_bias({rows, columns}, options).fill_(-kInfinity);
  bias.triu_(std::clamp(1 - band.least, -rows, columns));
  if (band.most < rows - 1) {
    bias.add_(at::full({rows, columns}, -kInfinity, options).tril_(std::clamp(-band.most - 1, -rows, columns)));
  }
  return {bias, {}};
}

// Returns the bias of a mask: a boolean mask becomes 0 and minus infinity, a mask of numbers is copied. `options`:
// those of the queries.
Bias bias_of_mask(const at::Tensor& mask, const at::TensorOptions& options) {
  const bool stays_float32 = mask.scalar_type() == at::kFloat && options.device().is_cpu();
  at::Tensor bias = empty_bias(mask.sizes(), stays_float32 ? options.dtype(at::kFloat) : options);
  if (mask.scalar_type() == at::kBool) {
    bias.fill_(-kInfinity).masked_fill_(mask, 0);
  } else {
    bias.copy_(mask);
  }
  at::Tensor blind = bias.amax(-1, /*keepdim=*/true).eq(-kInfinity);
  bias.masked_fill_(blind, 0);
  return {bias, blind};
}

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// One tile of a product, in the form that kernels use.
struct Operands {
  // True if kernels shall apply the triangle themselves.
  bool is_causal() const { return !bias && shape == BlockShape::kTriangle; }

  // True if flash attention on CUDA supports this tile.
  bool is_for_flash() const {
    const int64_t depth = q.size(3);
    return is_half(q) && !bias && depth == v.size(3) && depth % 8 == 0 && depth <= 256;
  }
  // Returns the bias, with one element in dims that repeat.
  std::optional<at::Tensor> added() const { return bias ? std::optional(bias->added) : std::nullopt; }
  // Returns the bias for kernels that need it for each head.
  std::optional<at::Tensor> expanded_bias() const {
    if (!bias) return std::nullopt;
    return bias->added.expand({q.size(0), q.size(1), q.size(2), k.size(2)});
  }

  at::Tensor q, k, v;        // [batch, heads, rows or columns, depth]
  BlockShape shape;          // the pairs of query and key that are visible
  std::optional<Bias> bias;  // set for masks and for shapes that kernels lack
  int64_t per_kv;            // query heads per head of keys and values
  double scale;              // factor of the scores
};

// Returns the bytes per element of operands and bias, from which the sizes of tiles follow. A float32 mask may need a
// float32 bias.
AttendItems items_of(const at::Tensor& operand, const std::optional<PairMask>& mask, const Buffers& buffers) {
  const int64_t bytes = operand.element_size();
  const bool is_in_float32 = mask && buffers[mask->buffer].scalar_type() == at::kFloat;
  return {bytes, is_in_float32 ? std::max<int64_t>(bytes, 4) : bytes};
}

// The tiles of a product. Each is a range of rows with the columns that these rows see, small enough for its bias
// (program/attend_tiles.h). Operands are views, or padded copies if the kernel needs equal depths. `Product` is Attend
// or AttendBackward.
template <typename Product>
class Tiles {
 public:
  Tiles(const Product& product, const Buffers& buffers) : o_(product), buffers_(buffers) {
    const AttendSizes& s = o_.sizes;
    q_ = view(o_.q, buffers, s.batch, {s.heads, 0, s.rows}, s.depth);
    k_ = view(o_.k, buffers, s.batch, {s.kv_heads, 0, s.columns}, s.depth);
    v_ = view(o_.v, buffers, s.batch, {s.kv_heads, 0, s.columns}, s.value_depth);
    tiles_ = tiles_of(o_, items_of(q_, o_.mask, buffers));
    const int64_t deepest = std::max(s.depth, s.value_depth);
    const bool takes_depths_apart = q_.is_cuda() && !uses_flash(deepest);
    const int64_t depth = padded_depth(takes_depths_apart ? s.depth : deepest);
    q_ = padded(q_, depth);
    k_ = padded(k_, depth);
    v_ = padded(v_, takes_depths_apart ? padded_depth(s.value_depth) : depth);
  }

  const std::vector<VisiblePart>& tiles() const { return tiles_; }

  // Returns the operands of a tile, with the bias if it needs one.
  Operands at(const VisiblePart& tile) const {
    Operands operands;
    operands.q = q_.narrow(2, tile.first_row, tile.rows);
    operands.k = k_.narrow(2, tile.first_column, tile.columns);
    operands.v = v_.narrow(2, tile.first_column, tile.columns);
    operands.shape = shape_of(tile.band, tile.rows, tile.columns);
    operands.per_kv = o_.sizes.heads / o_.sizes.kv_heads;
    operands.scale = o_.scale;
    if (o_.mask) {
      operands.bias = bias_of_mask(view(*o_.mask, buffers_, o_.sizes, tile), q_.options());
    } else if (operands.shape == BlockShape::kOther) {
      operands.bias = bias_of_band(tile.band, tile.rows, tile.columns, q_.options());
    }
    return operands;
  }

  // Returns the tile's rows of the result or of its gradient, padded to the depth of the kernel's values.
  at::Tensor result(const Heads& heads, const VisiblePart& tile) const {
    const AttendSizes& s = o_.sizes;
    return padded(view(heads, buffers_, s.batch, {s.heads, tile.first_row, tile.rows}, s.value_depth), v_.size(3));
  }

 private:
  // Rounds the depth up to a multiple of 16 bytes, which device kernels load at once. Returns elements.
  int64_t padded_depth(int64_t depth) const {
    if (q_.is_cpu()) return depth;
    const int64_t items = 16 / q_.element_size();
    return ceil_divide(depth, items) * items;
  }
  // Returns true if flash attention computes the tiles. It supports no bias, and needs keys and values of one depth.
  bool uses_flash(int64_t depth) const { return is_half(q_) && !o_.mask && padded_depth(depth) <= 256; }

  const Product& o_;
  const Buffers& buffers_;
  at::Tensor q_, k_, v_;
  std::vector<VisiblePart> tiles_;
};

// Repeats each head of keys `times` times, once for each head of queries that shares it.
at::Tensor repeated(const at::Tensor& keys, int64_t times) {
  if (times == 1) return keys;
  return keys.unsqueeze(2).expand({-1, -1, times, -1, -1}).reshape({keys.size(0), -1, keys.size(2), keys.size(3)});
}

// The gradient of `repeated`: sums every group of `times` consecutive heads, in float32.
at::Tensor summed(const at::Tensor& gradient, int64_t times) {
  if (times == 1) return gradient;
  return gradient.unflatten(1, {-1, times}).to(at::kFloat).sum(2);
}

// Pads the rows of an lse to a multiple of 32, as the kernels expect.
at::Tensor padded_lse(const at::Tensor& lse) {
  const int64_t rows = lse.size(2);
  at::Tensor padded = at::full({lse.size(0), lse.size(1), (rows + 31) / 32 * 32}, kInfinity, lse.options());
  padded.narrow(2, 0, rows).copy_(lse);
  return padded;
}

// Copies a result into the memory order [batch, rows, heads, depth] of memory-efficient attention's own forward, which
// is the only order that its backward supports.
at::Tensor rows_before_heads(const at::Tensor& out) { return out.transpose(1, 2).contiguous().transpose(1, 2); }

// Returns the result and the lse of a tile, by the kernel of the device (attend.h).
std::tuple<at::Tensor, at::Tensor> forward(const Operands& o) {
  if (o.q.is_cpu()) {
    return at::_scaled_dot_product_flash_attention_for_cpu(o.q, o.k, o.v, 0.0, o.is_causal(), o.added(), o.scale);
  }
  if (!o.q.is_cuda()) {
    const auto results = at::_scaled_dot_product_fused_attention_overrideable(
        o.q, repeated(o.k, o.per_kv), repeated(o.v, o.per_kv), o.expanded_bias(), 0.0, o.is_causal(),
        /*return_debug_mask=*/false, o.scale);
    return {std::get<0>(results), std::get<1>(results)};
  }
  if (o.is_for_flash()) {
    auto results = at::_scaled_dot_product_flash_attention(o.q, o.k, o.v, 0.0, o.is_causal(), false, o.scale);
    return {std::get<0>(results), std::get<1>(results)};
  }
  auto results = at::_scaled_dot_product_efficient_attention(o.q, repeated(o.k, o.per_kv), repeated(o.v, o.per_kv),
                                                             o.expanded_bias(), /*compute_log_sumexp=*/true, 0.0,
                                                             o.is_causal(), o.scale);
  return {std::get<0>(results), std::get<1>(results).narrow(2, 0, o.q.size(2))};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of q, k and v

// Returns the gradients of a tile. `out` and `lse` are the result over all keys, not only over this tile.
Gradients backward(const Operands& o, const at::Tensor& dout, const at::Tensor& out, const at::Tensor& lse) {
  if (o.q.is_cpu()) {
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(dout, o.q, o.k, o.v, out, lse, 0.0, o.is_causal(),
                                                                    o.added(), o.scale);
  }
  const std::optional<at::Tensor> bias = o.expanded_bias();
  if (!o.q.is_cuda()) {
    const at::Tensor none;
    const auto [dq, dk, dv, dbias] = at::_scaled_dot_product_fused_attention_overrideable_backward(
        dout, o.q, repeated(o.k, o.per_kv), repeated(o.v, o.per_kv), bias.value_or(none), {true, true, true, false},
        out, lse, none, none, o.q.size(2), o.k.size(2), 0.0, o.is_causal(), none, none, o.scale);
    return {dq, summed(dk, o.per_kv), summed(dv, o.per_kv)};
  }
  const at::Tensor seed = at::zeros({}, o.q.options().dtype(at::kLong));
  if (o.is_for_flash()) {
    return at::_scaled_dot_product_flash_attention_backward(dout, o.q, o.k, o.v, out, lse.contiguous(), at::Tensor(),
                                                            at::Tensor(), o.q.size(2), o.k.size(2), 0.0, o.is_causal(),
                                                            seed, seed, o.scale);
  }
  auto [dq, dk, dv, dbias] = at::_scaled_dot_product_efficient_attention_backward(
      dout, o.q, repeated(o.k, o.per_kv), repeated(o.v, o.per_kv), bias.value_or(at::Tensor()), rows_before_heads(out),
      padded_lse(lse), seed, seed, 0.0, {true, true, true, false}, o.is_causal(), o.scale);
  return {dq, summed(dk, o.per_kv), summed(dv, o.per_kv)};
}

// The rows of a partial result, for a loop on CPU.
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

// out = (out_left * exp(lse_left - most) + out_right * exp(lse_right - most)) / total, where `most` is the larger lse
// and `total` the sum of both exponentials; lse = most + log(total).
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
      if (std::isinf(most) && most < 0) continue;  // neither side sees a key
      const T left_weight = std::exp(sum - most);
      const T right_weight = std::exp(other - most);
      const T total = left_weight + right_weight;
      T* to = left.out_at(b, h, row);
      const T* from = right.out_at(b, h, row);
      for (int64_t d = 0; d < s.value_depth; ++d) to[d] = (to[d] * left_weight + from[d] * right_weight) / total;
      sum = most + std::log(total);
    }
  });
}

// Like merge_on_cpu. Where neither side sees a key, the exponentials are 0 and the divisor is a tiny positive number.
void merge_with_aten(const Merge& o, const Buffers& buffers) {
  const AttendSizes& s = o.sizes;
  at::Tensor left = view(o.left.lse, buffers, s, 0, s.rows);
  const at::Tensor right = view(o.right.lse, buffers, s, 0, s.rows);
  at::Tensor most = left.maximum(right);
  most.masked_fill_(most.eq(-kInfinity), 0);
  const at::Tensor left_weight = left.sub(most).exp_();
  const at::Tensor right_weight = right.sub(most).exp_();
  const at::Tensor total = left_weight.add(right_weight);
  const at::Tensor divisor = total.clamp_min(std::numeric_limits<float>::min()).unsqueeze(-1);
  at::Tensor out = view(o.left.out, buffers, s.batch, all_rows(s), s.value_depth);
  const at::Tensor right_out = view(o.right.out, buffers, s.batch, all_rows(s), s.value_depth);
  out.mul_(left_weight.unsqueeze(-1)).addcmul_(right_out, right_weight.unsqueeze(-1));
  out.div_(divisor);
  left.copy_(total.log().add_(most));
}

}  // namespace

void attend(const Attend& o, const Buffers& buffers) {
  const AttendSizes& s = o.sizes;
  at::Tensor out = view(o.result.out, buffers, s.batch, all_rows(s), s.value_depth);
  at::Tensor lse = view(o.result.lse, buffers, s, 0, s.rows);
  const std::optional<VisiblePart> part = visible_part(o.band, s.rows, s.columns);
  if (!part || part->rows < s.rows) {
    out.zero_();
    lse.fill_(-kInfinity);
  }
  if (!part || s.batch * s.heads == 0) return;
  const Tiles<Attend> product(o, buffers);
  for (const VisiblePart& tile : product.tiles()) {
    const Operands operands = product.at(tile);
    const auto [padded_out, sums] = forward(operands);
    at::Tensor rows = out.narrow(2, tile.first_row, tile.rows).copy_(without_padding(padded_out, s.value_depth));
    at::Tensor sums_of_rows = lse.narrow(2, tile.first_row, tile.rows).copy_(sums);
    if (!operands.bias || !operands.bias->blind.defined()) continue;
    rows.masked_fill_(operands.bias->blind, 0);
    sums_of_rows.masked_fill_(operands.bias->blind.squeeze(-1), -kInfinity);
  }
}

void attend_backward(const AttendBackward& o, const Buffers& buffers) {
  const AttendSizes& s = o.sizes;
  if (!visible_part(o.band, s.rows, s.columns) || s.batch * s.heads == 0) return;
  const Tiles<AttendBackward> product(o, buffers);
  for (const VisiblePart& tile : product.tiles()) {
    const Operands operands = product.at(tile);
    at::Tensor lse = view(o.lse, buffers, s, tile.first_row, tile.rows);
    // A weight is exp(score - lse), so an lse of infinity gives these rows weights of 0.
    if (operands.bias && operands.bias->blind.defined()) {
      lse = lse.masked_fill(operands.bias->blind.squeeze(-1), kInfinity);
    }
    const auto [dq, dk, dv] = backward(operands, product.result(o.dout, tile), product.result(o.out, tile), lse);
    const RowsOfHeads of_queries{s.heads, tile.first_row, tile.rows};
    const RowsOfHeads of_keys{s.kv_heads, tile.first_column, tile.columns};
    view(o.dq, buffers, s.batch, of_queries, s.depth).add_(without_padding(dq, s.depth));
    view(o.dk, buffers, s.batch, of_keys, s.depth).add_(without_padding(dk, s.depth));
    view(o.dv, buffers, s.batch, of_keys, s.value_depth).add_(without_padding(dv, s.value_depth));
  }
}

void merge(const Merge& o, const Buffers& buffers) {
  const at::Tensor& left = buffers[o.left.out.buffer];
  if (!left.is_cpu()) return merge_with_aten(o, buffers);
  left.scalar_type() == at::kDouble ? merge_on_cpu<double>(o, buffers) : merge_on_cpu<float>(o, buffers);
}

void accumulate(const Accumulate& o, const Buffers& buffers) {
  const AttendSizes& s = o.sizes;
  view(o.dst, buffers, s.batch, all_rows(s), s.depth).add_(view(o.src, buffers, s.batch, all_rows(s), s.depth));
}

}  // namespace shardwright
