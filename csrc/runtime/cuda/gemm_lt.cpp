// Products that cuBLASLt does better than ATen: 16-bit operands into float32, and batches, each in place with one
// launch; products that leave multiprocessors to transfers; products of 8-bit floats.
//
// An algorithm is requested once per kind of product and then cached. The host never waits.
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
constexpr bool kHasScalesOfRows = CUBLAS_VERSION >= 120900;

// Returns NVIDIA's recommended workspace size for cuBLAS, by architecture.
size_t workspace_limit_bytes() {
  return at::cuda::getCurrentDeviceProperties()->major >= 9 ? size_t{32} << 20 : size_t{4} << 20;
}

// Scratch memory for a product.
struct Workspace {
  void* data = nullptr;
  c10::DataPtr own;  // owns `data` in a capture; else empty, because the stream's workspace is never freed
};

// Returns the workspace of a stream. Products of one stream run one after the other and share it. Concurrent products
// must not share a workspace, because they would overwrite each other's partial sums. Streams are from pools of a fixed
// size, so the number of workspaces is limited. A graph's workspace is from the graph's memory, because its replays may
// run at the same time as the stream on which it was captured.
Workspace workspace_for(const Algorithm& algorithm, c10::cuda::CUDAStream stream) {
  if (algorithm.workspace_bytes == 0) return {};
  Workspace workspace;
  if (at::cuda::currentStreamCaptureStatusMayInitCtx() != at::cuda::CaptureStatus::None) {
    workspace.own = c10::cuda::CUDACachingAllocator::get()->allocate(algorithm.workspace_bytes);
    workspace.data = workspace.own.get();
    return workspace;
  }
  static std::mutex mutex;
  // Never destroyed, because at exit the allocator may already be gone.
  static auto& kept = *new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, at::Tensor>;
  const std::lock_guard<std::mutex> lock(mutex);
  at::Tensor& of_stream = kept[{stream.device_index(), stream.id()}];
  if (!of_stream.defined()) {
    of_stream = allocate_lasting(static_cast<int64_t>(workspace_limit_bytes()), stream);
  }
  workspace.data = of_stream.mutable_data_ptr();
  return workspace;
}

// ---------------------------------------------------------------------------------------------------- products

// Returns the handle and the current stream for a problem's device.
Device device_of(const Problem& problem) {
  return {at::cuda::getCurrentCUDABlasLtHandle(), c10::cuda::getCurrentCUDAStream(problem.device).stream(),
          workspace_limit_bytes()};
}

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

// Returns the bias vector for cuBLASLt's epilogue: one value per row of d, contiguous, in d's dtype. It is a view of
// the buffer where possible. Returns an undefined tensor if the bias differs between columns.
at::Tensor bias_of_rows(const Gemm& gemm, const at::Tensor& buffer, bool swaps, at::ScalarType dtype) {
  const View view{*gemm.bias, gemm.m, gemm.n};
  const View bias = swaps ? view.transposed() : view;
  if (bias.columns > 1 && bias.first.column_stride != 0) return {};
  return at::as_strided(buffer, {bias.rows}, {bias.first.row_stride}, buffer.storage_offset() + bias.first.offset)
      .to(dtype)
      .contiguous();
}

// DeviceGemms::multiply of CUDA. Leaves a single product into the operands' dtype to ATen, unless multiprocessors must
// be left to transfers.
bool multiply_on_cuda(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst,
                      const at::Tensor& bias, const GemmHints& hints) {
  const at::ScalarType operands = lhs.scalar_type();
  const bool is_for_aten = gemm.count == 1 && dst.scalar_type() == operands && hints.sms_left == 0;
  if (is_for_aten || !is_supported(operands, dst.scalar_type())) return false;
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
  return multiply(*problem, pointers, gemm.accumulates);
}

bool multiply_scaled_on_cuda(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs,
                             const at::Tensor& lhs_scale, const at::Tensor& rhs_scale, at::Tensor& dst,
                             const GemmHints& hints);

// Adds a product scaled by row to `dst`. cuBLASLt's documentation defines scales by row only for a product that is not
// added to anything, and the request for an algorithm does not contain that. So the product is written to a separate
// buffer, dense and row-major or column-major like the result, and then added in float32.
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
  return multiply(*problem, pointers, gemm.accumulates);
}

// DeviceGemms::waves_of of CUDA. Requests an algorithm for buffers at address 0, which has the best alignment.
std::optional<double> waves_on_cuda(const Gemm& gemm, at::ScalarType operands, at::ScalarType dst, at::Device device,
                                    const GemmHints& hints) {
  if (gemm.m == 0 || gemm.n == 0 || gemm.k == 0 || gemm.count == 0 || !is_supported(operands, dst)) return std::nullopt;
  const c10::cuda::CUDAGuard guard(device);
  auto problem = problem_of(gemm, operands, operands, dst, c10::cuda::current_device(), hints);
  if (!problem) return std::nullopt;
  const Buffer operand{0, static_cast<int64_t>(c10::elementSize(operands))};
  const Buffer result{0, static_cast<int64_t>(c10::elementSize(dst))};
  const Pointers pointers = point(*problem, gemm, operand, operand, result);
  const auto algorithm = find_algorithm(device_of(*problem), *problem, pointers);
  return algorithm ? std::optional<double>(algorithm->waves) : std::nullopt;
}

const bool kRegistered = register_device_gemms(at::kCUDA, {multiply_on_cuda, multiply_scaled_on_cuda, waves_on_cuda});

}  // namespace
}  // namespace shardwright::lt
