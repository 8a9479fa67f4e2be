// Rows of tokens: gathered, weighted and summed. On CPU our own loops, elsewhere ATen's operators, none of which waits
// for the device.
//
// Tensors of rows are [n, width], elements of a row next to each other, any distance between rows. Indices and tables
// are int64 on the rows' device; -1 stands for a row of zeros. Sums are taken in the order of a table's columns, in
// float32 (float64 for float64 and float32 weights of it), and rounded once; so they do not depend on what arrived
// first.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace shardwright {

// out[i] = rows[index[i]], for any dtype; `out` of the same width and dtype.
void take_rows_into(const at::Tensor& rows, const at::Tensor& index, const at::Tensor& out);
at::Tensor take_rows(const at::Tensor& rows, const at::Tensor& index);

// result[m] = sum over j of weights[m, j] * rows[table[m, j]]; without weights a plain sum.
at::Tensor sum_rows(const at::Tensor& rows, const at::Tensor& table, const std::optional<at::Tensor>& weights);

// result[p] = weights.flat[pairs[p]] * rows[pairs[p] / number of columns of weights].
at::Tensor take_weighted_rows(const at::Tensor& rows, const at::Tensor& pairs, const at::Tensor& weights);

// result[m, j] = <rows[table[m, j]], others[m]>, as `dtype`.
at::Tensor dot_rows(const at::Tensor& rows, const at::Tensor& table, const at::Tensor& others, at::ScalarType dtype);

}  // namespace shardwright
