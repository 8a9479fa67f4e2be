#include "runtime/local_ops.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "support/error.h"

namespace shardwright {
namespace {

// Number of elements in a block. All parts of a block are reduced before the next block, so that its accumulators stay
// in cache.
constexpr int64_t kBlock = 2048;

// Reduces parts, at least one, of n elements each into dst, block by block, and divides by `divisor` unless Item is an
// integer.
template <typename Item, typename Accumulator, typename Combine>
void reduce_blocks(const std::vector<const Item*>& parts, int64_t n, double divisor, Item* dst,
                   const Combine& combine) {
  Accumulator block[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = std::min(kBlock, n - begin);
    for (int64_t i = 0; i < count; ++i) block[i] = static_cast<Accumulator>(parts[0][begin + i]);
    for (size_t m = 1; m < parts.size(); ++m) {
      const Item* part = parts[m] + begin;
      for (int64_t i = 0; i < count; ++i) block[i] = combine(block[i], static_cast<Accumulator>(part[i]));
    }
    if constexpr (!std::is_integral_v<Item>) {
      if (divisor != 1) {
        for (int64_t i = 0; i < count; ++i) block[i] = block[i] / static_cast<Accumulator>(divisor);
      }
    }
    for (int64_t i = 0; i < count; ++i) dst[begin + i] = static_cast<Item>(block[i]);
  }
}

// True if a value is NaN; false for integers and bool.
template <typename T>
bool is_nan(T value) {
  if constexpr (std::is_floating_point_v<T>) return std::isnan(value);
  return false;
}

// Reduces parts of n elements each into dst and divides. Throws InvariantError if the dtype does not support `op`.
template <typename Item>
void reduce_on_cpu(ReduceOp op, const std::vector<const Item*>& parts, int64_t n, double divisor, Item* dst) {
  using Accumulator = at::opmath_type<Item>;
  const auto run = [&](const auto& combine) { reduce_blocks<Item, Accumulator>(parts, n, divisor, dst, combine); };
  if (op == ReduceOp::kSum) {
    if constexpr (std::is_same_v<Item, bool>)
      return run([](bool a, bool b) { return a || b; });
    else
      return run([](Accumulator a, Accumulator b) { return static_cast<Accumulator>(a + b); });
  }
  if (op == ReduceOp::kProduct) {
    if constexpr (std::is_same_v<Item, bool>)
      return run([](bool a, bool b) { return a && b; });
    else
      return run([](Accumulator a, Accumulator b) { return static_cast<Accumulator>(a * b); });
  }
  if constexpr (!c10::is_complex<Item>::value) {
    // The result is NaN if either operand is NaN, as in torch.minimum and torch.maximum.
    if (op == ReduceOp::kMin) {
      return run([](Accumulator a, Accumulator b) { return is_nan(a) || a < b ? a : b; });
    }
    if (op == ReduceOp::kMax) {
      return run([](Accumulator a, Accumulator b) { return is_nan(a) || a > b ? a : b; });
    }
  }
  if constexpr (std::is_integral_v<Item>) {
    if (op == ReduceOp::kBitAnd) return run([](Item a, Item b) { return static_cast<Item>(a & b); });
    if (op == ReduceOp::kBitOr) return run([](Item a, Item b) { return static_cast<Item>(a | b); });
    if (op == ReduceOp::kBitXor) return run([](Item a, Item b) { return static_cast<Item>(a ^ b); });
  }
  throw InvariantError(concat("the reduction '", reduce_op_name(op), "' does not support this dtype"));
}

// Computes out = a op b, element by element; `out` may be `a`.
void combine_into(ReduceOp op, const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  switch (op) {
    case ReduceOp::kSum:
      at::add_out(out, a, b);
      break;
    case ReduceOp::kProduct:
      at::mul_out(out, a, b);
      break;
    case ReduceOp::kMin:
      at::minimum_out(out, a, b);
      break;
    case ReduceOp::kMax:
      at::maximum_out(out, a, b);
      break;
    case ReduceOp::kBitAnd:
      at::bitwise_and_out(out, a, b);
      break;
    case ReduceOp::kBitOr:
      at::bitwise_or_out(out, a, b);
      break;
    case ReduceOp::kBitXor:
      at::bitwise_xor_out(out, a, b);
      break;
    default:
      throw InvariantError(concat("'", reduce_op_name(op), "' is not a local reduction"));
  }
}

// Returns the parts as one tensor [parts, elements]: a view if they are consecutive in one storage, else a copy.
at::Tensor rows_of(const std::vector<at::Tensor>& parts) {
  const int64_t n = parts[0].numel();
  for (size_t m = 1; m < parts.size(); ++m) {
    const int64_t expected = parts[0].storage_offset() + static_cast<int64_t>(m) * n;
    if (!parts[m].is_alias_of(parts[0]) || parts[m].storage_offset() != expected) return at::stack(parts);
  }
  return at::as_strided(parts[0], {static_cast<int64_t>(parts.size()), n}, {n, 1}, parts[0].storage_offset());
}

// Returns the registered functions, by type of device; null if none.
std::array<DeviceReduce, at::COMPILE_TIME_MAX_DEVICE_TYPES>& device_reductions() {
  static std::array<DeviceReduce, at::COMPILE_TIME_MAX_DEVICE_TYPES> reductions{};
  return reductions;
}

// Returns the registered functions, by type of device; null if none.
std::array<DeviceCopy, at::COMPILE_TIME_MAX_DEVICE_TYPES>& device_copies() {
  static std::array<DeviceCopy, at::COMPILE_TIME_MAX_DEVICE_TYPES> copies{};
  return copies;
}

}  // namespace

bool register_device_copy(at::DeviceType device, DeviceCopy copy) {
  device_copies()[static_cast<size_t>(device)] = copy;
  return true;
}

bool register_device_reduce(at::DeviceType device, DeviceReduce reduce) {
  device_reductions()[static_cast<size_t>(device)] = reduce;
  return true;
}

void run(const StridedCopy& copy, const at::Tensor& src, at::Tensor& dst) {
  if (src.device().is_cpu()) {
    return run(copy, src.const_data_ptr(), dst.mutable_data_ptr(),
               [](int64_t count, int64_t grain, const auto& body) { at::parallel_for(0, count, grain, body); });
  }
  if (const DeviceCopy device_copy = device_copies()[static_cast<size_t>(src.device().type())]) {
    return device_copy(copy, src, dst);
  }
  copy_with_aten(copy.boxes(), src, dst);
}

void copy_with_aten(const std::vector<Box>& boxes, const at::Tensor& src, at::Tensor& dst) {
  for (const Box& box : boxes) {
    at::Tensor to = at::as_strided(dst, box.sizes, box.dst_strides, dst.storage_offset() + box.dst_offset);
    to.copy_(at::as_strided(src, box.sizes, box.src_strides, src.storage_offset() + box.src_offset));
  }
}

void run_divided(const StridedCopy& copy, double divisor, const at::Tensor& src, at::Tensor& dst) {
  for (const Box& box : copy.boxes()) {
    at::Tensor to = at::as_strided(dst, box.sizes, box.dst_strides, dst.storage_offset() + box.dst_offset);
    at::div_out(to, at::as_strided(src, box.sizes, box.src_strides, src.storage_offset() + box.src_offset),
                at::scalar_tensor(divisor, src.options().device(at::kCPU).dtype(at::kDouble)));
  }
}

// Adding 16-bit parts one after another would round each partial sum. So they are summed in one call, as rows of one
// tensor.
void reduce_parts_with_aten(ReduceOp op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor& dst) {
  const bool is_narrow = dst.scalar_type() == at::kHalf || dst.scalar_type() == at::kBFloat16;
  const bool rounds_in_between = is_narrow && (parts.size() > 2 || (parts.size() == 2 && divisor != 1));
  if (op == ReduceOp::kSum && rounds_in_between) {
    const at::Tensor rows = rows_of(parts);
    if (divisor == 1) {
      at::sum_out(dst, rows, {0}, false, dst.scalar_type());
    } else {
      at::div_out(dst, at::sum(rows, {0}, false, at::kFloat), at::scalar_tensor(divisor));
    }
    return;
  }
  if (parts.size() == 1) {
    dst.copy_(parts[0]);
  } else {
    combine_into(op, parts[0], parts[1], dst);
  }
  for (size_t m = 2; m < parts.size(); ++m) combine_into(op, dst, parts[m], dst);
  if (divisor != 1) dst.div_(divisor);
}

void reduce_parts(ReduceOp op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor& dst) {
  if (!dst.device().is_cpu()) {
    const DeviceReduce device_reduce = device_reductions()[static_cast<size_t>(dst.device().type())];
    if (device_reduce != nullptr && device_reduce(op, parts, divisor, dst)) return;
    return reduce_parts_with_aten(op, parts, divisor, dst);
  }
  std::vector<const void*> starts;
  for (const at::Tensor& part : parts) starts.push_back(part.const_data_ptr());
  reduce_parts(op, starts, dst.numel(), divisor, dst.mutable_data_ptr(), dst.scalar_type());
}

void reduce_parts(ReduceOp op, const std::vector<const void*>& parts, int64_t count, double divisor, void* dst,
                  at::ScalarType dtype) {
  AT_DISPATCH_ALL_TYPES_AND_COMPLEX_AND3(at::kHalf, at::kBFloat16, at::kBool, dtype, "shardwright::reduce_parts", [&] {
    std::vector<const scalar_t*> starts;
    for (const void* part : parts) starts.push_back(static_cast<const scalar_t*>(part));
    reduce_on_cpu<scalar_t>(op, starts, count, divisor, static_cast<scalar_t*>(dst));
  });
}

}  // namespace shardwright
