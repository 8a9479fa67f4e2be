// Products by cuBLASLt: into float32 from 16-bit operands and in batches with one launch each, in place; laid out for
// some of the multiprocessors; of 8-bit floats.
//
// cuBLASLt knows column-major matrices: d = op(a) x op(b), where op may transpose and d is not transposed. A result
// that lies row-major is the transpose of one that lies column-major, and lhs x rhs = (rhs^T x lhs^T)^T. So whatever
// has a stride of 1 is multiplied where it is:
//
//   all by rows, lhs m x k, rhs k x n, dst m x n:   by columns, a = rhs^T is n x k, b = lhs^T is k x m, d is n x m
//
// An algorithm is asked for once per kind of product and kept. The host waits for nothing.
#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDADataType.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/StringUtil.h>
#include <cublasLt.h>
#include <ATen/cuda/CUDAGraphsUtils.cuh>

#include <algorithm>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "runtime/gemm.h"

namespace shardwright {
namespace {

// ------------------------------------------------------------------------------------------- matrices by columns

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

// The same as cuBLASLt sees it: `rows` x `columns` in memory, by columns; to be transposed, or not, when multiplied.
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

bool lies_by_columns(const View& view) {
  return (view.place.row_stride == 1 || view.rows == 1) && (view.place.column_stride >= view.rows || view.columns == 1);
}

// A single row or column lies both ways; by its dense side it is loaded in wider words. Nothing where no stride is 1.
//   1 x 6 with strides (0, 1): 6 x 1 by columns, transposed.   1 x 6 with strides (0, 4): by columns, leading dim 4
std::optional<Layout> layout_of(const View& view, at::ScalarType dtype) {
  const View turned = view.transposed();
  const bool is_transposed = lies_by_columns(turned) && (view.rows == 1 || !lies_by_columns(view));
  const View& seen = is_transposed ? turned : view;
  if (!lies_by_columns(seen)) return std::nullopt;
  Layout layout;
  layout.dtype = at::cuda::ScalarTypeToCudaDataType(dtype);
  layout.rows = seen.rows;
  layout.columns = seen.columns;
  layout.leading_dim = seen.columns == 1 ? seen.rows : seen.place.column_stride;
  layout.batch_stride = seen.batch_stride;
  layout.is_transposed = is_transposed;
  return layout;
}

// Of everything that begins at the address or multiples of the stride behind it, up to what cuBLASLt distinguishes.
uint32_t alignment_of(const void* address, int64_t stride_bytes = 0) {
  constexpr uintptr_t kMost = 256;
  const uintptr_t bits = reinterpret_cast<uintptr_t>(address) | static_cast<uintptr_t>(stride_bytes) | kMost;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

// ------------------------------------------------------------------------------------------------- the problem

enum class Scales : int8_t { kNone, kByTensor, kByRow };

// All that the choice of an algorithm depends on, and its key. Of the operands, `a` comes from rhs where dst lies by
// rows (`swaps`).
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

const char* name_of(cudaDataType_t dtype) {
  switch (dtype) {
    case CUDA_R_16F:
      return "float16";
    case CUDA_R_16BF:
      return "bfloat16";
    case CUDA_R_32F:
      return "float32";
    case CUDA_R_64F:
      return "float64";
    case CUDA_R_8F_E4M3:
      return "float8_e4m3fn";
    case CUDA_R_8F_E5M2:
      return "float8_e5m2";
    default:
      return "another dtype";
  }
}

// As it was asked for: m x k x n, lhs before rhs.
std::string to_string(const Problem& problem) {
  const Layout& lhs = problem.swaps ? problem.b : problem.a;
  const Layout& rhs = problem.swaps ? problem.a : problem.b;
  const auto order = [&](const Layout& layout) {
    return layout.is_transposed != problem.swaps ? " by rows" : " by columns";
  };
  const int64_t k = problem.a.is_transposed ? problem.a.rows : problem.a.columns;
  const int64_t m = problem.swaps ? problem.d.columns : problem.d.rows;
  const int64_t n = problem.swaps ? problem.d.rows : problem.d.columns;
  return c10::str(problem.count, " x (m = ", m, ", k = ", k, ", n = ", n, ") of ", name_of(lhs.dtype), order(lhs),
                  " and ", name_of(rhs.dtype), order(rhs), " into ", name_of(problem.d.dtype), order(problem.d),
                  ", leading dims ", lhs.leading_dim, ", ", rhs.leading_dim, " and ", problem.d.leading_dim,
                  problem.bias_alignment_bytes > 0 ? ", with a bias" : "",
                  problem.scales == Scales::kByRow ? ", scaled by rows" : "",
                  problem.fast_accumulation ? ", accumulated fast" : "",
                  problem.num_sms > 0 ? c10::str(", for ", problem.num_sms, " multiprocessors") : std::string(),
                  " on cuda:", static_cast<int>(problem.device));
}

void check(cublasStatus_t status, const char* function, const Problem& problem) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "shardwright: ", function, " answered ", cublasLtGetStatusName(status),
              " for ", to_string(problem));
}

// As ATen decides it, from the same switches.
cublasComputeType_t compute_type(at::ScalarType operands) {
  if (operands == at::kDouble) return CUBLAS_COMPUTE_64F;
  const bool is_tf32 =
      operands == at::kFloat && at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
                                    at::Float32Precision::TF32;
  return is_tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

uint32_t reduction_schemes(at::ScalarType operands) {
  at::CuBLASReductionOption option = at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  if (operands == at::kHalf) option = at::globalContext().allowFP16ReductionCuBLAS();
  if (operands == at::kBFloat16) option = at::globalContext().allowBF16ReductionCuBLAS();
  switch (option) {
    case at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK:
      return CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    case at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK:
      return CUBLASLT_REDUCTION_SCHEME_NONE;
    default:
      return CUBLASLT_REDUCTION_SCHEME_MASK;
  }
}

// 0: all of them.
int target_of(const GemmHints& hints) {
  const int all = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  return hints.sms_left > 0 && hints.sms_left < all ? all - hints.sms_left : 0;
}

// Nothing where an operand or the result has no stride of 1. Alignments are filled in by `point`.
std::optional<Problem> problem_of(const Gemm& gemm, at::ScalarType lhs_dtype, at::ScalarType rhs_dtype,
                                  at::ScalarType dst_dtype, at::DeviceIndex device, const GemmHints& hints) {
  const bool is_batch = gemm.count > 1;
  const View lhs{gemm.lhs, gemm.m, gemm.k, is_batch ? gemm.lhs_batch_stride : 0};
  const View rhs{gemm.rhs, gemm.k, gemm.n, is_batch ? gemm.rhs_batch_stride : 0};
  const View dst{gemm.dst, gemm.m, gemm.n, is_batch ? gemm.dst_batch_stride : 0};
  auto d = layout_of(dst, dst_dtype);
  if (!d) return std::nullopt;
  Problem problem;
  problem.swaps = std::exchange(d->is_transposed, false);
  auto a = problem.swaps ? layout_of(rhs.transposed(), rhs_dtype) : layout_of(lhs, lhs_dtype);
  auto b = problem.swaps ? layout_of(lhs.transposed(), lhs_dtype) : layout_of(rhs, rhs_dtype);
  if (!a || !b) return std::nullopt;
  problem.a = *a;
  problem.b = *b;
  problem.d = *d;
  problem.count = gemm.count;
  problem.compute = compute_type(lhs_dtype);
  problem.reduction_schemes = reduction_schemes(lhs_dtype);
  problem.num_sms = target_of(hints);
  problem.device = device;
  return problem;
}

// Where a buffer begins, and the bytes of an element.
struct Buffer {
  uintptr_t begin = 0;
  int64_t item_bytes = 0;

  // Takes down in the layout how the matrix is aligned.
  void* point(const Matrix& matrix, Layout& layout) const {
    auto* address = reinterpret_cast<void*>(begin + matrix.offset * item_bytes);
    layout.alignment_bytes = alignment_of(address, layout.batch_stride * item_bytes);
    return address;
  }
};

Pointers point(Problem& problem, const Gemm& gemm, const Buffer& lhs, const Buffer& rhs, const Buffer& dst) {
  Pointers pointers;
  pointers.a = problem.swaps ? rhs.point(gemm.rhs, problem.a) : lhs.point(gemm.lhs, problem.a);
  pointers.b = problem.swaps ? lhs.point(gemm.lhs, problem.b) : rhs.point(gemm.rhs, problem.b);
  pointers.d = dst.point(gemm.dst, problem.d);
  return pointers;
}

Pointers point(Problem& problem, const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst) {
  const auto buffer = [](const at::Tensor& tensor, const void* begin) {
    return Buffer{reinterpret_cast<uintptr_t>(begin), static_cast<int64_t>(tensor.element_size())};
  };
  return point(problem, gemm, buffer(lhs, lhs.const_data_ptr()), buffer(rhs, rhs.const_data_ptr()),
               buffer(dst, dst.mutable_data_ptr()));
}

// ------------------------------------------------------------------------------------------------ descriptors

template <auto kDestroy>
struct Destroyer {
  template <typename T>
  void operator()(T* descriptor) const {
    kDestroy(descriptor);
  }
};
using MatmulDesc = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroyer<cublasLtMatmulDescDestroy>>;
using LayoutDesc = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroyer<cublasLtMatrixLayoutDestroy>>;
using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroyer<cublasLtMatmulPreferenceDestroy>>;

// What a descriptor's attribute is set to has the size that cuBLASLt documents for it: the callers name the type.
template <typename Value>
void set(const MatmulDesc& desc, cublasLtMatmulDescAttributes_t attribute, Value value, const Problem& problem) {
  check(cublasLtMatmulDescSetAttribute(desc.get(), attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute",
        problem);
}

template <typename Value>
void set(const LayoutDesc& desc, cublasLtMatrixLayoutAttribute_t attribute, Value value, const Problem& problem) {
  check(cublasLtMatrixLayoutSetAttribute(desc.get(), attribute, &value, sizeof(value)),
        "cublasLtMatrixLayoutSetAttribute", problem);
}

template <typename Value>
void set(const Preference& desc, cublasLtMatmulPreferenceAttributes_t attribute, Value value, const Problem& problem) {
  check(cublasLtMatmulPreferenceSetAttribute(desc.get(), attribute, &value, sizeof(value)),
        "cublasLtMatmulPreferenceSetAttribute", problem);
}

LayoutDesc describe(const Layout& layout, const Problem& problem) {
  cublasLtMatrixLayout_t made = nullptr;
  check(cublasLtMatrixLayoutCreate(&made, layout.dtype, layout.rows, layout.columns, layout.leading_dim),
        "cublasLtMatrixLayoutCreate", problem);
  LayoutDesc desc(made);
  if (problem.count > 1) {
    set<int32_t>(desc, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(problem.count), problem);
    set<int64_t>(desc, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, layout.batch_stride, problem);
  }
  return desc;
}

// The kinds of scales came with cuBLAS 12.9; before it there was one number per tensor and nothing to say about it.
constexpr bool kHasScalesOfRows = CUBLAS_VERSION >= 120900;

#if CUBLAS_VERSION >= 120900
void set_kind_of_scales(const MatmulDesc& desc, const Problem& problem) {
  const int32_t kind = problem.scales == Scales::kByRow ? CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
                                                        : CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  set<int32_t>(desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, kind, problem);
  set<int32_t>(desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, kind, problem);
}
#else
void set_kind_of_scales(const MatmulDesc&, const Problem&) {}
#endif

MatmulDesc describe(const Problem& problem, const Pointers& pointers) {
  cublasLtMatmulDesc_t made = nullptr;
  check(cublasLtMatmulDescCreate(&made, problem.compute, problem.scalar_type()), "cublasLtMatmulDescCreate", problem);
  MatmulDesc desc(made);
  set<int32_t>(desc, CUBLASLT_MATMUL_DESC_TRANSA, problem.a.is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, problem);
  set<int32_t>(desc, CUBLASLT_MATMUL_DESC_TRANSB, problem.b.is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, problem);
  if (problem.num_sms > 0) set<int32_t>(desc, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, problem.num_sms, problem);
  if (problem.bias_alignment_bytes > 0) {
    set<uint32_t>(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS, problem);
    set<int32_t>(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, problem.d.dtype, problem);
    set<const void*>(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointers.bias, problem);
  }
  if (problem.scales != Scales::kNone) {
    set_kind_of_scales(desc, problem);
    if (problem.fast_accumulation) set<int8_t>(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, 1, problem);
    set<const void*>(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, pointers.a_scale, problem);
    set<const void*>(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, pointers.b_scale, problem);
  }
  return desc;
}

struct Descriptors {
  MatmulDesc matmul;
  LayoutDesc a;
  LayoutDesc b;
  LayoutDesc d;

  Descriptors(const Problem& problem, const Pointers& pointers)
      : matmul(describe(problem, pointers)),
        a(describe(problem.a, problem)),
        b(describe(problem.b, problem)),
        d(describe(problem.d, problem)) {}
};

// ------------------------------------------------------------------------------------------------- algorithms

struct Algorithm {
  cublasLtMatmulAlgo_t algorithm{};
  size_t workspace_bytes = 0;
  double waves = 0;
};

// NVIDIA's advice for cuBLAS, by generation.
size_t workspace_limit_bytes() {
  return at::cuda::getCurrentDeviceProperties()->major >= 9 ? size_t{32} << 20 : size_t{4} << 20;
}

// Nothing where cuBLASLt has none.
std::optional<Algorithm> ask_for_algorithm(const Problem& problem, const Descriptors& descriptors) {
  cublasLtMatmulPreference_t made = nullptr;
  check(cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate", problem);
  const Preference preference(made);
  set<uint64_t>(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_limit_bytes(), problem);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, problem.reduction_schemes, problem);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, problem.a.alignment_bytes, problem);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, problem.b.alignment_bytes, problem);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, problem.d.alignment_bytes, problem);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, problem.d.alignment_bytes, problem);
  cublasLtMatmulHeuristicResult_t found{};
  int num_found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      at::cuda::getCurrentCUDABlasLtHandle(), descriptors.matmul.get(), descriptors.a.get(), descriptors.b.get(),
      descriptors.d.get(), descriptors.d.get(), preference.get(), 1, &found, &num_found);
  // Architectures without a kind of scales may not know its name either.
  const bool is_unknown = status == CUBLAS_STATUS_INVALID_VALUE && problem.scales != Scales::kNone;
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || is_unknown) return std::nullopt;
  if (status == CUBLAS_STATUS_SUCCESS && num_found == 0) return std::nullopt;
  check(status, "cublasLtMatmulAlgoGetHeuristic", problem);
  return Algorithm{found.algo, found.workspaceSize, found.wavesCount};
}

// Kept: asking takes longer than launching. Started again when full, which a job with that many kinds of products
// affords.
std::optional<Algorithm> algorithm_for(const Problem& problem, const Descriptors& descriptors) {
  constexpr size_t kMost = 4096;
  static std::mutex mutex;
  static std::map<Problem, std::optional<Algorithm>> kept;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = kept.find(problem); found != kept.end()) return found->second;
  }
  const std::optional<Algorithm> algorithm = ask_for_algorithm(problem, descriptors);
  const std::lock_guard<std::mutex> lock(mutex);
  if (kept.size() >= kMost) kept.clear();
  kept.insert_or_assign(problem, algorithm);
  return algorithm;
}

struct Workspace {
  void* data = nullptr;
  c10::DataPtr own;  // empty where it is kept
};

// One per stream: two products at work on one workspace would overwrite each other's partial sums, and products of one
// stream follow one another. Streams come from pools of a fixed size, so there are only so many. A graph's workspace is
// of the graph's memory: its replays may run beside the stream that it was captured on.
Workspace workspace_for(const Algorithm& algorithm, c10::cuda::CUDAStream stream) {
  if (algorithm.workspace_bytes == 0) return {};
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  Workspace workspace;
  if (at::cuda::currentStreamCaptureStatusMayInitCtx() != at::cuda::CaptureStatus::None) {
    workspace.own = allocator->allocate(algorithm.workspace_bytes);
    workspace.data = workspace.own.get();
    return workspace;
  }
  static std::mutex mutex;
  // Never destroyed: at exit the allocator may be gone before.
  static auto& kept = *new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, c10::DataPtr>;
  const std::lock_guard<std::mutex> lock(mutex);
  c10::DataPtr& of_stream = kept[{stream.device_index(), stream.id()}];
  if (!of_stream) of_stream = allocator->allocate(workspace_limit_bytes());
  workspace.data = of_stream.get();
  return workspace;
}

// ---------------------------------------------------------------------------------------------------- products

void launch(const Problem& problem, const Pointers& pointers, const Descriptors& descriptors,
            const Algorithm& algorithm, bool accumulates) {
  const auto stream = c10::cuda::getCurrentCUDAStream(problem.device);
  const Workspace workspace = workspace_for(algorithm, stream);
  const double doubles[] = {0, 1};
  const float floats[] = {0, 1};
  const bool is_double = problem.scalar_type() == CUDA_R_64F;
  const auto number = [&](int i) { return is_double ? static_cast<const void*>(&doubles[i]) : &floats[i]; };
  check(cublasLtMatmul(at::cuda::getCurrentCUDABlasLtHandle(), descriptors.matmul.get(), number(1), pointers.a,
                       descriptors.a.get(), pointers.b, descriptors.b.get(), number(accumulates ? 1 : 0), pointers.d,
                       descriptors.d.get(), pointers.d, descriptors.d.get(), &algorithm.algorithm, workspace.data,
                       algorithm.workspace_bytes, stream.stream()),
        "cublasLtMatmul", problem);
}

bool is_ours(at::ScalarType operands, at::ScalarType dst) {
  const bool is_16_bit = operands == at::kHalf || operands == at::kBFloat16;
  const bool is_wide = operands == at::kFloat || operands == at::kDouble;
  return (is_16_bit && (dst == operands || dst == at::kFloat)) || (is_wide && dst == operands);
}

// As the epilogue adds it to the columns of d: one value per row of d, dense, of d's dtype. Undefined where it is not
// the same for all columns. Usually a view of the buffer.
at::Tensor bias_of_rows(const Gemm& gemm, const at::Tensor& buffer, bool swaps, at::ScalarType dtype) {
  const View given{*gemm.bias, gemm.m, gemm.n};
  const View bias = swaps ? given.transposed() : given;
  if (bias.columns > 1 && bias.place.column_stride != 0) return {};
  return at::as_strided(buffer, {bias.rows}, {bias.place.row_stride}, buffer.storage_offset() + bias.place.offset)
      .to(dtype)
      .contiguous();
}

bool multiply_on_cuda(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst,
                      const at::Tensor& bias, const GemmHints& hints) {
  const at::ScalarType operands = lhs.scalar_type();
  const bool is_for_aten = gemm.count == 1 && dst.scalar_type() == operands && hints.sms_left == 0;
  if (is_for_aten || !is_ours(operands, dst.scalar_type())) return false;
  if (gemm.m == 0 || gemm.n == 0 || gemm.count == 0) return true;
  const c10::cuda::CUDAGuard guard(dst.device());
  auto problem = problem_of(gemm, operands, operands, dst.scalar_type(), dst.device().index(), hints);
  if (!problem) return false;
  Pointers pointers = point(*problem, gemm, lhs, rhs, dst);
  at::Tensor added;
  if (gemm.bias) {
    added = bias_of_rows(gemm, bias, problem->swaps, dst.scalar_type());
    if (!added.defined()) return false;
    pointers.bias = added.const_data_ptr();
    problem->bias_alignment_bytes = alignment_of(pointers.bias);
  }
  const Descriptors descriptors(*problem, pointers);
  const auto algorithm = algorithm_for(*problem, descriptors);
  if (!algorithm) return false;
  launch(*problem, pointers, descriptors, *algorithm, gemm.accumulates);
  return true;
}

bool multiply_scaled_on_cuda(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs,
                             const at::Tensor& lhs_scale, const at::Tensor& rhs_scale, at::Tensor& dst,
                             const GemmHints& hints);

// cuBLASLt defines scales by row for what is multiplied alone; that it takes them with something to be added to is
// nowhere said, and what asks for an algorithm is not told of it. So the product goes to a buffer of its own, dense, by
// rows or columns as the result, and is added in float32.
bool add_scaled_by_row(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
                       const at::Tensor& rhs_scale, at::Tensor& dst, const GemmHints& hints) {
  const bool is_by_rows = gemm.dst.column_stride == 1;
  Gemm alone = gemm;
  alone.accumulates = false;
  alone.dst.offset = 0;
  alone.dst.row_stride = is_by_rows ? gemm.n : 1;
  alone.dst.column_stride = is_by_rows ? 1 : gemm.m;
  alone.dst_batch_stride = gemm.m * gemm.n;
  at::Tensor product = at::empty({gemm.count * gemm.m * gemm.n}, dst.options().dtype(at::kFloat));
  if (!multiply_scaled_on_cuda(alone, lhs, rhs, lhs_scale, rhs_scale, product, hints)) return false;
  const auto matrices = [&](const at::Tensor& buffer, const Gemm& of) {
    const int64_t batch_stride = of.count > 1 ? of.dst_batch_stride : 0;
    return at::as_strided(buffer, {of.count, of.m, of.n}, {batch_stride, of.dst.row_stride, of.dst.column_stride},
                          buffer.storage_offset() + of.dst.offset);
  };
  matrices(dst, gemm).add_(matrices(product, alone));
  return true;
}

bool multiply_scaled_on_cuda(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs,
                             const at::Tensor& lhs_scale, const at::Tensor& rhs_scale, at::Tensor& dst,
                             const GemmHints& hints) {
  const c10::cuda::CUDAGuard guard(dst.device());
  const bool is_by_row = lhs_scale.numel() > 1 || rhs_scale.numel() > 1;
  if (is_by_row && gemm.accumulates) return add_scaled_by_row(gemm, lhs, rhs, lhs_scale, rhs_scale, dst, hints);
  auto problem = problem_of(gemm, lhs.scalar_type(), rhs.scalar_type(), dst.scalar_type(), dst.device().index(), hints);
  if (!problem) return false;
  Pointers pointers = point(*problem, gemm, lhs, rhs, dst);
  problem->scales = is_by_row ? Scales::kByRow : Scales::kByTensor;
  problem->fast_accumulation = hints.fast_accumulation;
  if (problem->scales == Scales::kByRow && !kHasScalesOfRows) return false;
  pointers.a_scale = (problem->swaps ? rhs_scale : lhs_scale).const_data_ptr();
  pointers.b_scale = (problem->swaps ? lhs_scale : rhs_scale).const_data_ptr();
  const Descriptors descriptors(*problem, pointers);
  const auto algorithm = algorithm_for(*problem, descriptors);
  if (!algorithm) return false;
  launch(*problem, pointers, descriptors, *algorithm, gemm.accumulates);
  return true;
}

std::optional<double> waves_on_cuda(const Gemm& gemm, at::ScalarType operands, at::ScalarType dst, at::Device device,
                                    const GemmHints& hints) {
  if (gemm.m == 0 || gemm.n == 0 || gemm.k == 0 || gemm.count == 0 || !is_ours(operands, dst)) return std::nullopt;
  const c10::cuda::CUDAGuard guard(device);
  auto problem = problem_of(gemm, operands, operands, dst, c10::cuda::current_device(), hints);
  if (!problem) return std::nullopt;
  const Buffer operand{0, static_cast<int64_t>(c10::elementSize(operands))};
  const Buffer result{0, static_cast<int64_t>(c10::elementSize(dst))};
  const Pointers pointers = point(*problem, gemm, operand, operand, result);
  const auto algorithm = algorithm_for(*problem, Descriptors(*problem, pointers));
  return algorithm ? std::optional<double>(algorithm->waves) : std::nullopt;
}

const bool kRegistered = register_device_gemms(at::kCUDA, {multiply_on_cuda, multiply_scaled_on_cuda, waves_on_cuda});

}  // namespace
}  // namespace shardwright
