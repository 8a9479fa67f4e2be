// Implements DeviceGemms (runtime/gemm.h) for CUDA with cuBLASLt, for products that it computes better than ATen:
// 16-bit operands into float32 and batches, each in place and with one launch; products that leave multiprocessors to
// transfers; and products of 8-bit floats.
//
// An algorithm is requested once per kind of product (Problem) and then cached. The host never waits.
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
#include "runtime/cuda/lasting_memory.h"
#include "runtime/cuda/lt_calls.h"
#include "runtime/gemm.h"

namespace shardwright::lt {
namespace {

// cuBLAS 12.9 introduced scales by row.
constexpr bool kHasRowScales = CUBLAS_VERSION >= 120900;

// Returns NVIDIA's recommended workspace size for cuBLAS on the current device.
size_t workspace_limit_bytes() {
  return at::cuda::getCurrentDeviceProperties()->major >= 9 ? size_t{32} << 20 : size_t{4} << 20;
}

// Scratch memory for a product.
struct Workspace {
  void* data = nullptr;
  c10::DataPtr owner;  // owns `data` in a capture; else empty, because the workspaces of streams are never freed
};

// Returns the workspace for a product on a stream. The products of one stream share a workspace, because they run one
// after another; concurrent products would overwrite each other's partial sums. Torch takes streams from pools of a
// fixed size, which limits the number of workspaces. In a capture, a workspace is allocated in the graph's memory,
// because replays may run at the same time as other work on the captured stream.
Workspace workspace_for(const Algorithm& algorithm, c10::cuda::CUDAStream stream) {
  if (algorithm.workspace_bytes == 0) return {};
  Workspace workspace;
  if (at::cuda::currentStreamCaptureStatusMayInitCtx() != at::cuda::CaptureStatus::None) {
    workspace.owner = c10::cuda::CUDACachingAllocator::get()->allocate(algorithm.workspace_bytes);
    workspace.data = workspace.owner.get();
    return workspace;
  }
  static std::mutex mutex;
  // Never destroyed, because at exit the allocator may already be gone.
  static auto& workspaces = *new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, at::Tensor>;
  const std::lock_guard<std::mutex> lock(mutex);
  at::Tensor& stream_workspace = workspaces[{stream.device_index(), stream.id()}];
  if (!stream_workspace.defined()) {
    stream_workspace = allocate_lasting(static_cast<int64_t>(workspace_limit_bytes()), stream);
  }
  workspace.data = stream_workspace.mutable_data_ptr();
  return workspace;
}

// ---------------------------------------------------------------------------------------------------- products

// Returns the handle and the current stream for a problem's device.
Device device_of(const Problem& problem) {
  return {at::cuda::getCurrentCUDABlasLtHandle(), c10::cuda::getCurrentCUDAStream(problem.device).stream(),
          workspace_limit_bytes()};
}

// Launches the product of a problem. Returns false, with nothing launched, if cuBLASLt does not support it.
bool multiply(const Problem& problem, const Pointers& pointers, bool accumulates) {
  Workspace workspace;
  return lt::multiply(device_of(problem), problem, pointers, accumulates, [&](const Algorithm& algorithm) {
    workspace = workspace_for(algorithm, c10::cuda::getCurrentCUDAStream(problem.device));
    return workspace.data;
  });
}

// True if this file supports the dtypes: 16-bit operands into the same dtype or float32, and float32 or float64 into
// the same dtype.
bool is_supported(at::ScalarType operands, at::ScalarType dst) {
  const bool is_16_bit = operands == at::kHalf || operands == at::kBFloat16;
  const bool is_wide = operands == at::kFloat || operands == at::kDouble;
  return (is_16_bit && (dst == operands || dst == at::kFloat)) || (is_wide && dst == operands);
}

// Returns the bias vector for cuBLASLt's epilogue: one value per row of d (gemm_problem.h), contiguous, in the dtype of
// d. It is a view of the buffer if possible. Returns an undefined tensor if the bias differs between columns of d.
at::Tensor bias_of_rows(const Gemm& gemm, const at::Tensor& buffer, bool swaps, at::ScalarType dtype) {
  const View view{*gemm.bias, gemm.m, gemm.n};
  const View bias = swaps ? view.transposed() : view;
  if (bias.columns > 1 && bias.first.column_stride != 0) return {};
  return at::as_strided(buffer, {bias.rows}, {bias.first.row_stride}, buffer.storage_offset() + bias.first.offset)
      .to(dtype)
      .contiguous();
}

// DeviceGemms::multiply of CUDA. ATen computes single products into the operands' dtype, unless multiprocessors must be
// left to transfers.
bool multiply_on_cuda(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst,
                      const at::Tensor& bias, const GemmHints& hints) {
  const at::ScalarType operands = lhs.scalar_type();
  const bool is_for_aten = gemm.count == 1 && dst.scalar_type() == operands && hints.sms_left == 0;
  if (is_for_aten || !is_supported(operands, dst.scalar_type())) return false;
  if (gemm.m == 0 || gemm.n == 0 || gemm.count == 0) return true;
  const c10::cuda::CUDAGuard guard(dst.device());
  auto problem = problem_of(gemm, operands, operands, dst.scalar_type(), dst.device().index(), hints);
  if (!problem) return false;
  Pointers pointers = pointers_of(*problem, gemm, lhs, rhs, dst);
  at::Tensor row_bias;
  if (gemm.bias) {
    row_bias = bias_of_rows(gemm, bias, problem->swaps, dst.scalar_type());
    if (!row_bias.defined()) return false;
    pointers.bias = row_bias.const_data_ptr();
    problem->bias_alignment_bytes = alignment_of(pointers.bias);
  }
  return multiply(*problem, pointers, gemm.accumulates);
}

// DeviceGemms::multiply_scaled of CUDA.
bool multiply_scaled_on_cuda(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs,
                             const at::Tensor& lhs_scale, const at::Tensor& rhs_scale, at::Tensor& dst,
                             const GemmHints& hints);

// Adds a product scaled by row to `dst`. cuBLASLt documents scales by row only for products that are not added to d
// (beta = 0), and its request for an algorithm does not include beta. So the product is written to a separate float32
// buffer, dense and row-major or column-major like `dst`, and then added.
bool add_scaled_by_row(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
                       const at::Tensor& rhs_scale, at::Tensor& dst, const GemmHints& hints) {
  const bool is_by_rows = gemm.dst.column_stride == 1;
  Gemm unaccumulated = gemm;
  unaccumulated.accumulates = false;
  unaccumulated.dst.offset = 0;
  unaccumulated.dst.row_stride = is_by_rows ? gemm.n : 1;
  unaccumulated.dst.column_stride = is_by_rows ? 1 : gemm.m;
  unaccumulated.dst_batch_stride = gemm.m * gemm.n;
  at::Tensor product = at::empty({gemm.count * gemm.m * gemm.n}, dst.options().dtype(at::kFloat));
  if (!multiply_scaled_on_cuda(unaccumulated, lhs, rhs, lhs_scale, rhs_scale, product, hints)) return false;
  const auto matrices_view = [](const at::Tensor& buffer, const Gemm& gemm) {
    const int64_t batch_stride = gemm.count > 1 ? gemm.dst_batch_stride : 0;
    return at::as_strided(buffer, {gemm.count, gemm.m, gemm.n},
                          {batch_stride, gemm.dst.row_stride, gemm.dst.column_stride},
                          buffer.storage_offset() + gemm.dst.offset);
  };
  matrices_view(dst, gemm).add_(matrices_view(product, unaccumulated));
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
  Pointers pointers = pointers_of(*problem, gemm, lhs, rhs, dst);
  problem->scales = is_by_row ? Scales::kByRow : Scales::kByTensor;
  problem->fast_accumulation = hints.fast_accumulation;
  if (problem->scales == Scales::kByRow && !kHasRowScales) return false;
  pointers.a_scale = (problem->swaps ? rhs_scale : lhs_scale).const_data_ptr();
  pointers.b_scale = (problem->swaps ? lhs_scale : rhs_scale).const_data_ptr();
  return multiply(*problem, pointers, gemm.accumulates);
}

// DeviceGemms::waves_of of CUDA. Finds the algorithm for buffers at address 0, which has the best alignment.
std::optional<double> waves_on_cuda(const Gemm& gemm, at::ScalarType operands, at::ScalarType dst, at::Device device,
                                    const GemmHints& hints) {
  if (gemm.m == 0 || gemm.n == 0 || gemm.k == 0 || gemm.count == 0 || !is_supported(operands, dst)) return std::nullopt;
  const c10::cuda::CUDAGuard guard(device);
  auto problem = problem_of(gemm, operands, operands, dst, c10::cuda::current_device(), hints);
  if (!problem) return std::nullopt;
  const Buffer operand{0, static_cast<int64_t>(c10::elementSize(operands))};
  const Buffer result{0, static_cast<int64_t>(c10::elementSize(dst))};
  const Pointers pointers = pointers_of(*problem, gemm, operand, operand, result);
  const auto algorithm = find_algorithm(device_of(*problem), *problem, pointers);
  return algorithm ? std::optional<double>(algorithm->waves) : std::nullopt;
}

const bool kRegistered = register_device_gemms(at::kCUDA, {multiply_on_cuda, multiply_scaled_on_cuda, waves_on_cuda});

}  // namespace
}  // namespace shardwright::lt
