#include "runtime/expert_rows.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "runtime/staging.h"

namespace shardwright {
namespace {

constexpr int64_t kMinBytesPerTask = 1 << 16;  // of at::parallel_for

// Returns rows with a stride of 1 between their elements, with pending conjugation and negation applied. Copies them
// only if needed.
at::Tensor with_dense_rows(const at::Tensor& input) {
  const at::Tensor rows = input.resolve_conj().resolve_neg();
  return rows.size(1) <= 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

// Returns the minimum number of rows of a task of at::parallel_for.
int64_t grain_of(int64_t row_bytes) { return std::max<int64_t>(1, kMinBytesPerTask / std::max<int64_t>(row_bytes, 1)); }

// Returns the widest integer dtype as which the rows of both tensors can be viewed. Rows are copied as integers,
// because ATen lacks some operators for some dtypes.
at::ScalarType word_dtype_of(const at::Tensor& rows, const at::Tensor& out) {
  const auto item = static_cast<int64_t>(rows.element_size());
  const auto divides = [&](int64_t word) {
    for (const at::Tensor* tensor : {&rows, &out}) {
      for (const int64_t items : {tensor->storage_offset(), tensor->stride(0), tensor->size(1)}) {
        if (items * item % word != 0) return false;
      }
    }
    return true;
  };
  return divides(8) ? at::kLong : divides(4) ? at::kInt : divides(2) ? at::kShort : at::kByte;
}

// Computes take_rows_into with ATen. For index -1 it takes row 0 and then sets it to zero.
void take_rows_with_aten(const at::Tensor& rows, const at::Tensor& index, at::Tensor out) {
  if (rows.size(0) == 0) {
    out.zero_();
    return;
  }
  const at::ScalarType word = word_dtype_of(rows, out);
  const at::Tensor taken = rows.view(word).index_select(0, at::clamp_min(index, 0));
  out.view(word).copy_(taken.masked_fill_(index.lt(0).unsqueeze(1), 0));
}

// Returns column j of the sum: weights[:, j] * rows[table[:, j]], in `dtype`, with zeros where the table has -1.
at::Tensor column_of(const at::Tensor& rows, const at::Tensor& table, const std::optional<at::Tensor>& weights,
                     int64_t j, at::ScalarType dtype) {
  const at::Tensor index = table.select(1, j);
  at::Tensor column = rows.index_select(0, at::clamp_min(index, 0)).to(dtype);
  if (weights) column = column * weights->select(1, j).to(dtype).unsqueeze(1);
  return at::where(index.ge(0).unsqueeze(1), column, at::zeros({}, column.options()));
}

// Computes sum_rows with ATen: adds the columns one by one, in the dtype in which sums are accumulated.
at::Tensor sum_rows_with_aten(const at::Tensor& rows, const at::Tensor& table,
                              const std::optional<at::Tensor>& weights) {
  const at::ScalarType dtype = at::toOpMathType(rows.scalar_type());
  if (rows.size(0) == 0 || table.size(1) == 0) return at::zeros({table.size(0), rows.size(1)}, rows.options());
  at::Tensor sum = column_of(rows, table, weights, 0, dtype);
  for (int64_t j = 1; j < table.size(1); ++j) sum = sum + column_of(rows, table, weights, j, dtype);
  return sum.to(rows.scalar_type());
}

// Returns the registered functions, by type of device; null if none.
std::array<DeviceSumRows, at::COMPILE_TIME_MAX_DEVICE_TYPES>& device_sums() {
  static std::array<DeviceSumRows, at::COMPILE_TIME_MAX_DEVICE_TYPES> sums{};
  return sums;
}

// Computes sum_rows on a device other than CPU: by its registered function; by ATen if there is none or nothing to sum.
at::Tensor sum_rows_on_device(const at::Tensor& rows, const at::Tensor& table,
                              const std::optional<at::Tensor>& weights) {
  const DeviceSumRows device_sum = device_sums()[static_cast<size_t>(rows.device().type())];
  if (device_sum == nullptr || rows.numel() == 0 || table.numel() == 0) {
    return sum_rows_with_aten(rows, table, weights);
  }
  at::Tensor out = at::empty({table.size(0), rows.size(1)}, rows.options());
  std::optional<at::Tensor> factors;
  if (weights) factors = weights->resolve_neg().contiguous();
  device_sum(rows, table.contiguous(), factors, out);
  return out;
}

// Computes sum_rows with threads over the result's rows. Without weights, `weights` is null.
template <typename Item, typename Weight>
void sum_rows_on_cpu(const at::Tensor& rows, const at::Tensor& table, const Weight* weights, at::Tensor& out) {
  using Sum = at::opmath_type<Item>;
  const int64_t width = rows.size(1);
  const int64_t columns = table.size(1);
  const Item* from = rows.const_data_ptr<Item>();
  const int64_t stride = rows.stride(0);
  const int64_t* source_rows = table.const_data_ptr<int64_t>();
  Item* to = out.mutable_data_ptr<Item>();
  const int64_t row_bytes = width * columns * static_cast<int64_t>(sizeof(Item));
  at::parallel_for(0, table.size(0), grain_of(row_bytes), [&](int64_t begin, int64_t end) {
    std::vector<Sum> sums(width);
    for (int64_t m = begin; m < end; ++m) {
      bool is_first = true;
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t source_row = source_rows[m * columns + j];
        if (source_row < 0) continue;
        const Item* row = from + source_row * stride;
        const Sum weight = weights == nullptr ? Sum(1) : static_cast<Sum>(weights[m * columns + j]);
        if (is_first) {
          for (int64_t i = 0; i < width; ++i) sums[i] = weight * static_cast<Sum>(row[i]);
        } else {
          for (int64_t i = 0; i < width; ++i) sums[i] += weight * static_cast<Sum>(row[i]);
        }
        is_first = false;
      }
      if (is_first) std::fill(sums.begin(), sums.end(), Sum(0));
      for (int64_t i = 0; i < width; ++i) to[m * width + i] = static_cast<Item>(sums[i]);
    }
  });
}

// Computes dot_rows with threads over the table's rows. A pair is an entry of the table.
template <typename Item, typename Result>
void dot_rows_on_cpu(const at::Tensor& rows, const at::Tensor& table, const at::Tensor& others, at::Tensor& out) {
  using Sum = at::opmath_type<Item>;
  const int64_t width = rows.size(1);
  const int64_t columns = table.size(1);
  const Item* left = rows.const_data_ptr<Item>();
  const Item* right = others.const_data_ptr<Item>();
  const int64_t* source_rows = table.const_data_ptr<int64_t>();
  Result* to = out.mutable_data_ptr<Result>();
  at::parallel_for(0, table.size(0), grain_of(width * columns * 4), [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin * columns; pair < end * columns; ++pair) {
      Sum sum = 0;
      if (source_rows[pair] >= 0) {
        const Item* a = left + source_rows[pair] * rows.stride(0);
        const Item* b = right + pair / columns * others.stride(0);
        for (int64_t i = 0; i < width; ++i) sum += static_cast<Sum>(a[i]) * static_cast<Sum>(b[i]);
      }
      to[pair] = static_cast<Result>(sum);
    }
  });
}

}  // namespace

bool register_device_sum_rows(at::DeviceType device, DeviceSumRows sum_rows) {
  device_sums()[static_cast<size_t>(device)] = sum_rows;
  return true;
}

void take_rows_into(const at::Tensor& input, const at::Tensor& index, const at::Tensor& out) {
  const at::Tensor rows = with_dense_rows(input);
  const int64_t count = index.size(0);
  const int64_t row_bytes = rows.size(1) * static_cast<int64_t>(rows.element_size());
  if (count == 0 || row_bytes == 0) return;
  if (!rows.device().is_cpu()) return take_rows_with_aten(rows, index, out);
  const auto item = static_cast<int64_t>(rows.element_size());
  const auto* from = static_cast<const char*>(rows.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t* source_rows = index.const_data_ptr<int64_t>();
  const int64_t from_stride = rows.stride(0) * item;
  const int64_t to_stride = out.stride(0) * item;
  at::parallel_for(0, count, grain_of(row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (source_rows[i] < 0) {
        std::memset(to + i * to_stride, 0, row_bytes);
      } else {
        std::memcpy(to + i * to_stride, from + source_rows[i] * from_stride, row_bytes);
      }
    }
  });
}

at::Tensor take_rows(const at::Tensor& rows, const at::Tensor& index) {
  const at::Tensor out = at::empty({index.size(0), rows.size(1)}, rows.options());
  prefer_huge_pages(out);
  take_rows_into(rows, index, out);
  return out;
}

at::Tensor sum_rows(const at::Tensor& input, const at::Tensor& table, const std::optional<at::Tensor>& weights) {
  const at::Tensor rows = with_dense_rows(input);
  if (!rows.device().is_cpu()) return sum_rows_on_device(rows, table, weights);
  at::Tensor out = at::empty({table.size(0), rows.size(1)}, rows.options());
  prefer_huge_pages(out);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "shardwright::sum_rows", [&] {
    using Item = scalar_t;
    if (!weights) return sum_rows_on_cpu<Item, float>(rows, table, nullptr, out);
    const at::Tensor factors = weights->resolve_neg().contiguous();
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, factors.scalar_type(), "shardwright::sum_rows", [&] {
      sum_rows_on_cpu<Item, scalar_t>(rows, table, factors.const_data_ptr<scalar_t>(), out);
    });
  });
  return out;
}

at::Tensor take_weighted_rows(const at::Tensor& rows, const at::Tensor& pairs, const at::Tensor& weights) {
  if (weights.numel() == 0) return at::zeros({pairs.size(0), rows.size(1)}, rows.options());
  const at::Tensor table = pairs.div(weights.size(1), "floor").unsqueeze(1);
  return sum_rows(rows, table, weights.reshape({-1}).index_select(0, at::clamp_min(pairs, 0)).unsqueeze(1));
}

at::Tensor dot_rows(const at::Tensor& input, const at::Tensor& table, const at::Tensor& other_input,
                    at::ScalarType dtype) {
  const at::Tensor rows = with_dense_rows(input);
  const at::Tensor others = with_dense_rows(other_input);
  if (rows.size(0) == 0 || table.numel() == 0) return at::zeros(table.sizes(), rows.options().dtype(dtype));
  if (!rows.device().is_cpu()) {
    const at::ScalarType sum_dtype = at::toOpMathType(rows.scalar_type());
    std::vector<at::Tensor> columns;
    for (int64_t j = 0; j < table.size(1); ++j) {
      columns.push_back((column_of(rows, table, std::nullopt, j, sum_dtype) * others.to(sum_dtype)).sum(1));
    }
    return at::stack(columns, 1).to(dtype);
  }
  at::Tensor out = at::empty(table.sizes(), rows.options().dtype(dtype));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "shardwright::dot_rows", [&] {
    using Item = scalar_t;
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "shardwright::dot_rows",
                                    [&] { dot_rows_on_cpu<Item, scalar_t>(rows, table, others, out); });
  });
  return out;
}

}  // namespace shardwright
