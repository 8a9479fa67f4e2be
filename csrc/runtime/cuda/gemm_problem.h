// Describes matrix products for cuBLASLt.
//
// cuBLASLt uses column-major matrices: d = op(a) x op(b), where op may transpose, and d is not transposed. A row-major
// result is the transpose of a column-major one, and lhs x rhs = (rhs^T x lhs^T)^T. So every matrix with a stride of 1
// is multiplied in place. For example, if all are row-major, lhs m x k, rhs k x n and dst m x n, then in column-major
// terms a = rhs^T is n x k, b = lhs^T is k x m, and d is n x m.
#pragma once

#include <ATen/core/Tensor.h>
#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>

#include "runtime/gemm.h"

namespace shardwright::lt {

// A matrix, or a batch of matrices, in a buffer.
struct View {
  Matrix first;  // buffer, offset and strides of the first matrix
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t batch_stride = 0;  // elements; 0 for one matrix

  View transposed() const {
    return {{first.buffer, first.offset, first.column_stride, first.row_stride}, columns, rows, batch_stride};
  }
};

// A matrix for cuBLASLt: `rows` x `columns` in memory, column-major; the product uses its transpose if `is_transposed`.
struct Layout {
  cudaDataType_t dtype = CUDA_R_32F;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t leading_dim = 0;       // elements from one column to the next
  int64_t batch_stride = 0;      // elements from one matrix to the next
  uint32_t alignment_bytes = 0;  // alignment_of the address and the batch stride; set by pointers_of
  bool is_transposed = false;

  auto operator<=>(const Layout&) const = default;
};

// Returns the largest power of two, at most 256, that divides `address` and `stride_bytes`. cuBLASLt does not
// distinguish larger alignments. For example, 64 for address 4096 and stride 192.
uint32_t alignment_of(const void* address, int64_t stride_bytes = 0);

// The scales of 8-bit operands: none, one per operand, or one per row of lhs and one per column of rhs.
enum class Scales : int8_t { kNone, kByTensor, kByRow };

// A product for cuBLASLt: all properties that the choice of an algorithm depends on. It is the key of cached
// algorithms.
struct Problem {
  Layout a;
  Layout b;
  Layout d;
  int64_t count = 1;  // products in the batch
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  uint32_t reduction_schemes = CUBLASLT_REDUCTION_SCHEME_MASK;  // allowed ways to add partial sums along k
  int num_sms = 0;                                              // multiprocessors to use; 0: all
  at::DeviceIndex device = 0;
  bool swaps = false;                 // dst is row-major, so `a` is from rhs and `b` from lhs
  uint32_t bias_alignment_bytes = 0;  // 0: no bias
  Scales scales = Scales::kNone;
  bool fast_accumulation = false;

  auto operator<=>(const Problem&) const = default;

  // The dtype of cuBLASLt's factors alpha and beta.
  cudaDataType_t scalar_type() const { return compute == CUBLAS_COMPUTE_64F ? CUDA_R_64F : CUDA_R_32F; }
};

// The addresses of a problem's operands, result, bias and scales; null if the product has none.
struct Pointers {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  const void* bias = nullptr;
  const void* a_scale = nullptr;
  const void* b_scale = nullptr;
};

// Returns a description for error messages, in terms of lhs, rhs and dst.
std::string to_string(const Problem& problem);

// Thrown if cuBLASLt does not support a product: on this architecture, in the loaded version, or with these layouts.
// Nothing was launched, so ATen can compute the product.
class Unsupported : public std::exception {
 public:
  const char* what() const noexcept override { return "cuBLASLt does not support this product here"; }
};

// Throws Unsupported for the statuses with which cuBLASLt declines a product (lt_calls.h), and c10::Error that names
// the function and the problem for other failures.
void check(cublasStatus_t status, const char* function, const Problem& problem);

// Returns the problem of a product, or nothing if an operand or the result has no stride of 1. `device` must be the
// current device. pointers_of sets the alignments of the matrices; callers set bias_alignment_bytes, `scales` and
// fast_accumulation.
std::optional<Problem> problem_of(const Gemm& gemm, at::ScalarType lhs_dtype, at::ScalarType rhs_dtype,
                                  at::ScalarType dst_dtype, at::DeviceIndex device, const GemmHints& hints);

// The address of a buffer and the size of its elements.
struct Buffer {
  uintptr_t begin = 0;
  int64_t item_bytes = 0;

  // Returns the address of a matrix in the buffer, and stores its alignment in the layout.
  void* address_of(const Matrix& matrix, Layout& layout) const;
};

// Returns the addresses of the operands and the result, and stores their alignments in the problem. The addresses of
// bias and scales stay null.
Pointers pointers_of(Problem& problem, const Gemm& gemm, const Buffer& lhs, const Buffer& rhs, const Buffer& dst);
Pointers pointers_of(Problem& problem, const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst);

}  // namespace shardwright::lt
