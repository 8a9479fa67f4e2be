#include "runtime/gemm.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>

namespace shardwright {
namespace {

at::Tensor view(const at::Tensor& buffer, const Matrix& matrix, int64_t rows, int64_t columns) {
  return at::as_strided(buffer, {rows, columns}, {matrix.row_stride, matrix.column_stride},
                        buffer.storage_offset() + matrix.offset);
}

at::Tensor batch_view(const at::Tensor& buffer, const Matrix& matrix, int64_t count, int64_t batch_stride, int64_t rows,
                      int64_t columns) {
  return at::as_strided(buffer, {count, rows, columns}, {batch_stride, matrix.row_stride, matrix.column_stride},
                        buffer.storage_offset() + matrix.offset);
}

void multiply_matrices(const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor dst, bool accumulates,
                       const at::Tensor& bias) {
  const at::Tensor& added = accumulates ? dst : bias;
  if (dst.scalar_type() == lhs.scalar_type()) {
    if (added.defined()) {
      at::addmm_out(dst, added, lhs, rhs);
    } else {
      at::mm_out(dst, lhs, rhs);
    }
  } else if (dst.device().is_cuda()) {
    if (added.defined()) {
      at::addmm_out(dst, added.to(dst.scalar_type()), lhs, rhs, dst.scalar_type());
    } else {
      at::mm_out(dst, lhs, rhs, dst.scalar_type());
    }
  } else {  // CPU has no product of mixed dtypes
    multiply_matrices(lhs.to(dst.scalar_type()), rhs.to(dst.scalar_type()), dst, accumulates,
                      bias.defined() ? bias.to(dst.scalar_type()) : bias);
  }
}

}  // namespace

void multiply(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst, const at::Tensor& bias) {
  const at::Tensor added = gemm.bias ? view(bias, *gemm.bias, gemm.m, gemm.n) : at::Tensor();
  const bool is_one_call =
      gemm.count > 1 && !added.defined() && dst.device().is_cuda() && dst.scalar_type() == lhs.scalar_type();
  if (is_one_call) {
    const at::Tensor a = batch_view(lhs, gemm.lhs, gemm.count, gemm.lhs_batch_stride, gemm.m, gemm.k);
    const at::Tensor b = batch_view(rhs, gemm.rhs, gemm.count, gemm.rhs_batch_stride, gemm.k, gemm.n);
    at::Tensor c = batch_view(dst, gemm.dst, gemm.count, gemm.dst_batch_stride, gemm.m, gemm.n);
    gemm.accumulates ? at::baddbmm_out(c, c, a, b) : at::bmm_out(c, a, b);
    return;
  }
  for (int64_t i = 0; i < gemm.count; ++i) {
    Gemm one = gemm;
    one.lhs.offset += i * gemm.lhs_batch_stride;
    one.rhs.offset += i * gemm.rhs_batch_stride;
    one.dst.offset += i * gemm.dst_batch_stride;
    multiply_matrices(view(lhs, one.lhs, gemm.m, gemm.k), view(rhs, one.rhs, gemm.k, gemm.n),
                      view(dst, one.dst, gemm.m, gemm.n), gemm.accumulates, added);
  }
}

}  // namespace shardwright
