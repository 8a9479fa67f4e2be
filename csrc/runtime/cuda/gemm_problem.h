// Translates matrix products into problems for cuBLASLt.
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

// A matrix, or a batch of them, in a buffer.
struct View {
  Matrix place;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t batch_stride = 0;

  View transposed() const {
    return {{place.buffer, place.offset, place.column_stride, place.row_stride}, columns, rows, batch_stride};
  }
};

// The same for cuBLASLt: `rows` x `columns` in memory, column-major, and whether it is transposed when multiplied.
struct Layout {
  cudaDataType_t dtype = CUDA_R_32F;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t leading_dim = 0;
  int64_t batch_stride = 0;
  uint32_t alignment_bytes = 0;
  bool is_transposed = false;

  auto operator<=>(const Layout&) const = default;
};

// Returns the alignment of everything that begins at the address plus a multiple of the stride, up to the largest one
// that cuBLASLt distinguishes.
uint32_t alignment_of(const void* address, int64_t stride_bytes = 0);

enum class Scales : int8_t { kNone, kByTensor, kByRow };

// Everything that the choice of an algorithm depends on; the key under which algorithms are kept. If dst is row-major
// (`swaps`), `a` comes from rhs and `b` from lhs.
struct Problem {
  Layout a;
  Layout b;
  Layout d;
  int64_t count = 1;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  uint32_t reduction_schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
  int num_sms = 0;
  at::DeviceIndex device = 0;
  bool swaps = false;
  uint32_t bias_alignment_bytes = 0;  // 0: no bias
  Scales scales = Scales::kNone;
  bool fast_accumulation = false;

  auto operator<=>(const Problem&) const = default;

  cudaDataType_t scalar_type() const { return compute == CUBLAS_COMPUTE_64F ? CUDA_R_64F : CUDA_R_32F; }
};

struct Pointers {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  const void* bias = nullptr;
  const void* a_scale = nullptr;
  const void* b_scale = nullptr;
};

// Describes the product as it was requested: m x k x n, lhs before rhs.
std::string to_string(const Problem& problem);

// cuBLASLt does not do a product: on this architecture, in the version that was loaded, or with these layouts. Nothing
// was launched, so ATen can do it.
class Unsupported : public std::exception {
 public:
  const char* what() const noexcept override { return "cuBLASLt does not do this product here"; }
};

// Throws Unsupported for the statuses with which cuBLASLt declines. On a failure, throws a c10::Error that names the
// function and the problem.
void check(cublasStatus_t status, const char* function, const Problem& problem);

// Returns nothing if an operand or the result has no stride of 1. Alignments are filled in by `point`.
std::optional<Problem> problem_of(const Gemm& gemm, at::ScalarType lhs_dtype, at::ScalarType rhs_dtype,
                                  at::ScalarType dst_dtype, at::DeviceIndex device, const GemmHints& hints);

// The address of a buffer and the size of its elements.
struct Buffer {
  uintptr_t begin = 0;
  int64_t item_bytes = 0;

  // Returns the address of the matrix, and fills in its alignment in the layout.
  void* point(const Matrix& matrix, Layout& layout) const;
};

// Fills in the alignments of the problem.
Pointers point(Problem& problem, const Gemm& gemm, const Buffer& lhs, const Buffer& rhs, const Buffer& dst);
Pointers point(Problem& problem, const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst);

}  // namespace shardwright::lt
