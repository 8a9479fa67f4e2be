// Gathers, weights and sums rows of tokens. On CPU by loops of this library; on other devices by ATen's operators,
// without a host wait, or by functions that are registered for the device.
//
// Tensors of rows are [n, width], with any strides; pending conjugation and negation are applied first. Indices and
// tables are contiguous int64 tensors on the rows' device, and -1 means a row of zeros. Sums and dot products take rows
// of float16, bfloat16, float32 or float64, and throw c10::Error for other dtypes on CPU. Sums are taken in the order
// of a table's columns, accumulated in float32 (float64 for float64), and rounded once. So they do not depend on the
// order of arrival.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace shardwright {

// out[i] = rows[index[i]], for any dtype; `out` has the width and dtype of `rows`, and its elements are consecutive
// within a row.
void take_rows_into(const at::Tensor& rows, const at::Tensor& index, const at::Tensor& out);
// Returns take_rows_into's result in a new tensor.
at::Tensor take_rows(const at::Tensor& rows, const at::Tensor& index);

// result[m] = sum over j of weights[m, j] * rows[table[m, j]]; without weights, all are 1. The result has the dtype of
// `rows`, and zeros where the table's row has only -1.
at::Tensor sum_rows(const at::Tensor& rows, const at::Tensor& table, const std::optional<at::Tensor>& weights);

// Computes sum_rows on one type of device, in a separate file that is built only if the device's toolkit is installed.
// It reads each row once and launches one kernel; ATen launches five for each column. `table`, `weights` and `out` are
// dense and not empty.
using DeviceSumRows = void (*)(const at::Tensor& rows, const at::Tensor& table,
                               const std::optional<at::Tensor>& weights, at::Tensor& out);
// Registers the function of a type of device. Returns true.
bool register_device_sum_rows(at::DeviceType device, DeviceSumRows sum_rows);

// result[p] = weights.flat[pairs[p]] * rows[pairs[p] / number of columns of weights]. `weights`: [rows, per row]; a
// pair is an index into its flat elements, or -1 for a row of zeros.
at::Tensor take_weighted_rows(const at::Tensor& rows, const at::Tensor& pairs, const at::Tensor& weights);

// result[m, j] = the dot product of rows[table[m, j]] and others[m], in `dtype`; `others` has the dtype of `rows`.
at::Tensor dot_rows(const at::Tensor& rows, const at::Tensor& table, const at::Tensor& others, at::ScalarType dtype);

}  // namespace shardwright
