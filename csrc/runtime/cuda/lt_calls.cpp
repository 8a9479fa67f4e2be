#include "runtime/cuda/lt_calls.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace shardwright::lt {
namespace {

// ------------------------------------------------------------------------------------------------ descriptors

// A deleter for std::unique_ptr that calls a function of cuBLASLt.
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

// Sets an attribute of a descriptor. The value must have the size that cuBLASLt documents, so callers write its type.
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

// Returns cuBLASLt's descriptor of a matrix.
LayoutDesc describe(const Layout& layout, const Problem& problem) {
  cublasLtMatrixLayout_t handle = nullptr;
  check(cublasLtMatrixLayoutCreate(&handle, layout.dtype, layout.rows, layout.columns, layout.leading_dim),
        "cublasLtMatrixLayoutCreate", problem);
  LayoutDesc desc(handle);
  if (problem.count > 1) {
    set<int32_t>(desc, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(problem.count), problem);
    set<int64_t>(desc, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, layout.batch_stride, problem);
  }
  return desc;
}

// Sets the scale mode of both operands, which cuBLAS 12.9 introduced. Before, there was only one scale per tensor. If
// the version at run time is older than 12.9, cuBLASLt returns "invalid value". A build with an older version sets
// nothing.
#if CUBLAS_VERSION >= 120900
void set_scale_mode(const MatmulDesc& desc, const Problem& problem) {
  const int32_t kind = problem.scales == Scales::kByRow ? CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
                                                        : CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  set<int32_t>(desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, kind, problem);
  set<int32_t>(desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, kind, problem);
}
#else
void set_scale_mode(const MatmulDesc&, const Problem&) {}
#endif

// Returns cuBLASLt's descriptor of a product, which contains the addresses of bias and scales.
MatmulDesc describe(const Problem& problem, const Pointers& pointers) {
  cublasLtMatmulDesc_t handle = nullptr;
  check(cublasLtMatmulDescCreate(&handle, problem.compute, problem.scalar_type()), "cublasLtMatmulDescCreate", problem);
  MatmulDesc desc(handle);
  set<int32_t>(desc, CUBLASLT_MATMUL_DESC_TRANSA, problem.a.is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, problem);
  set<int32_t>(desc, CUBLASLT_MATMUL_DESC_TRANSB, problem.b.is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, problem);
  if (problem.num_sms > 0) set<int32_t>(desc, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, problem.num_sms, problem);
  if (problem.bias_alignment_bytes > 0) {
    set<uint32_t>(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS, problem);
    set<int32_t>(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, problem.d.dtype, problem);
    set<const void*>(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointers.bias, problem);
  }
  if (problem.scales != Scales::kNone) {
    set_scale_mode(desc, problem);
    if (problem.fast_accumulation) set<int8_t>(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, 1, problem);
    set<const void*>(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, pointers.a_scale, problem);
    set<const void*>(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, pointers.b_scale, problem);
  }
  return desc;
}

// The descriptors of a product and its matrices.
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

// Requests the best algorithm from cuBLASLt. Throws Unsupported if cuBLASLt has none.
Algorithm request_algorithm(const Device& device, const Problem& problem, const Descriptors& descriptors) {
  cublasLtMatmulPreference_t handle = nullptr;
  check(cublasLtMatmulPreferenceCreate(&handle), "cublasLtMatmulPreferenceCreate", problem);
  const Preference preference(handle);
  set<uint64_t>(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, device.workspace_limit_bytes, problem);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, problem.reduction_schemes, problem);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, problem.a.alignment_bytes, problem);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, problem.b.alignment_bytes, problem);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, problem.d.alignment_bytes, problem);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, problem.d.alignment_bytes, problem);
  cublasLtMatmulHeuristicResult_t result{};
  int num_results = 0;
  check(cublasLtMatmulAlgoGetHeuristic(device.handle, descriptors.matmul.get(), descriptors.a.get(),
                                       descriptors.b.get(), descriptors.d.get(), descriptors.d.get(), preference.get(),
                                       1, &result, &num_results),
        "cublasLtMatmulAlgoGetHeuristic", problem);
  if (num_results == 0) throw Unsupported();
  check(result.state, "cublasLtMatmulAlgoGetHeuristic, in its result,", problem);
  return Algorithm{result.algo, result.workspaceSize, result.wavesCount};
}

// A cache of algorithms by problem, because requesting an algorithm takes longer than launching it. An entry of nullopt
// means that cuBLASLt declined the problem. The cache is cleared when it is full.
class AlgorithmCache {
 public:
  // Returns the entry of a problem; nothing if the problem is not cached.
  std::optional<std::optional<Algorithm>> find(const Problem& problem) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = algorithms_.find(problem);
    if (found == algorithms_.end()) return std::nullopt;
    return std::make_optional(found->second);  // std::optional(...) of an optional is that optional
  }

  // Sets the entry of a problem.
  void put(const Problem& problem, std::optional<Algorithm> algorithm) {
    constexpr size_t kMaxAlgorithms = 4096;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (algorithms_.size() >= kMaxAlgorithms) algorithms_.clear();
    algorithms_.insert_or_assign(problem, algorithm);
  }

 private:
  std::mutex mutex_;
  std::map<Problem, std::optional<Algorithm>> algorithms_;
};

// Returns the cache of this process. A problem contains its device, so all devices share the cache.
AlgorithmCache& algorithm_cache() {
  static AlgorithmCache instance;
  return instance;
}

// Returns the algorithm for a problem from the cache, or nullopt if the cache says that cuBLASLt declines. If the
// problem is not cached, requests an algorithm and caches it. If cuBLASLt declines this request, throws Unsupported and
// caches nothing; callers must then store nullopt in the cache.
std::optional<Algorithm> algorithm_for(const Device& device, const Problem& problem, const Descriptors& descriptors) {
  if (const auto known = algorithm_cache().find(problem)) return *known;
  const Algorithm algorithm = request_algorithm(device, problem, descriptors);
  algorithm_cache().put(problem, algorithm);
  return algorithm;
}

// Launches a product: d = a x b, or d += a x b if `accumulates`. Throws Unsupported if cuBLASLt declines.
void launch(const Device& device, const Problem& problem, const Pointers& pointers, const Descriptors& descriptors,
            const Algorithm& algorithm, bool accumulates, void* workspace) {
  const double doubles[] = {0, 1};
  const float floats[] = {0, 1};
  const bool is_double = problem.scalar_type() == CUDA_R_64F;
  const auto scalar = [&](int i) { return is_double ? static_cast<const void*>(&doubles[i]) : &floats[i]; };
  check(cublasLtMatmul(device.handle, descriptors.matmul.get(), scalar(1), pointers.a, descriptors.a.get(), pointers.b,
                       descriptors.b.get(), scalar(accumulates ? 1 : 0), pointers.d, descriptors.d.get(), pointers.d,
                       descriptors.d.get(), &algorithm.algorithm, workspace, algorithm.workspace_bytes, device.stream),
        "cublasLtMatmul", problem);
}

}  // namespace

std::optional<Algorithm> find_algorithm(const Device& device, const Problem& problem, const Pointers& pointers) {
  try {
    if (const auto known = algorithm_cache().find(problem)) return *known;
    return algorithm_for(device, problem, Descriptors(problem, pointers));
  } catch (const Unsupported&) {
    algorithm_cache().put(problem, std::nullopt);
    return std::nullopt;
  }
}

bool multiply(const Device& device, const Problem& problem, const Pointers& pointers, bool accumulates,
              const std::function<void*(const Algorithm&)>& workspace_of) {
  try {
    const Descriptors descriptors(problem, pointers);
    const std::optional<Algorithm> algorithm = algorithm_for(device, problem, descriptors);
    if (!algorithm) return false;
    launch(device, problem, pointers, descriptors, *algorithm, accumulates, workspace_of(*algorithm));
    return true;
  } catch (const Unsupported&) {
    algorithm_cache().put(problem, std::nullopt);
    return false;
  }
}

// For tests/python/test_lt_statuses.py: launches one product of 8 x `k` and `k` x 8 float16 matrices, with scales by
// row if `is_scaled` is not 0, without a device. Returns 1 if it was launched, 0 if cuBLASLt declined, -1 on an error.
extern "C" __attribute__((visibility("default"))) int shardwright_try_lt_product(int64_t k, int is_scaled) {
  Problem problem;
  problem.a = {CUDA_R_16F, 8, k, 8, 0, 256, false};
  problem.b = {CUDA_R_16F, k, 8, k, 0, 256, false};
  problem.d = {CUDA_R_32F, 8, 8, 8, 0, 256, false};
  problem.scales = is_scaled != 0 ? Scales::kByRow : Scales::kNone;
  try {
    return multiply({}, problem, {}, false, [](const Algorithm&) { return nullptr; }) ? 1 : 0;
  } catch (const std::exception&) {
    return -1;
  }
}

}  // namespace shardwright::lt
