// Products by cuBLASLt, for what ATen does not do as well: products of 16-bit operands into float32 and batches, in
// place and with one launch each; products that use only some of the multiprocessors; products of 8-bit floats.
//
// An algorithm is requested once per kind of product and then kept. The host never waits.
#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/StringUtil.h>
#include <cublasLt.h>
#include <ATen/cuda/CUDAGraphsUtils.cuh>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "runtime/cuda/gemm_problem.h"
#include "runtime/gemm.h"

namespace shardwright::lt {
namespace {

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

// The value of an attribute must have the size that cuBLASLt documents for it, so callers name its type.
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

// cuBLAS 12.9 introduced kinds of scales; before it there was only one scale per tensor.
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

// NVIDIA's recommendation for cuBLAS, by architecture.
size_t workspace_limit_bytes() {
  return at::cuda::getCurrentDeviceProperties()->major >= 9 ? size_t{32} << 20 : size_t{4} << 20;
}

// Returns nothing if cuBLASLt has no algorithm.
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
  // Architectures that do not support a kind of scales may report it as an invalid value.
  const bool is_unknown = status == CUBLAS_STATUS_INVALID_VALUE && problem.scales != Scales::kNone;
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || is_unknown) return std::nullopt;
  if (status == CUBLAS_STATUS_SUCCESS && num_found == 0) return std::nullopt;
  check(status, "cublasLtMatmulAlgoGetHeuristic", problem);
  return Algorithm{found.algo, found.workspaceSize, found.wavesCount};
}

// Algorithms are kept, because requesting one takes longer than launching it. The map is cleared when it is full; a job
// with that many kinds of products can afford that.
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
  c10::DataPtr own;  // empty if the workspace is kept
};

// There is one workspace per stream. Two products that run at the same time must not share one, because they would
// overwrite each other's partial sums, but products of one stream run one after the other. Streams come from pools of a
// fixed size, so their number is limited. A graph's workspace comes from the graph's memory, because its replays may
// run at the same time as the stream on which it was captured.
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
  // Never destroyed, because at exit the allocator may already be gone.
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

// Returns the bias as the epilogue adds it to the columns of d: one value per row of d, dense, in d's dtype. Undefined
// if it is not the same for all columns. Usually a view of the buffer.
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

// cuBLASLt's documentation defines scales by row only for a product that is not added to anything, and the request for
// an algorithm does not say whether something is added. So the product is written to a separate buffer, dense and
// row-major or column-major like the result, and then added in float32.
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
}  // namespace shardwright::lt
