// Copies of boxes on the GPU, for packing and unpacking: one launch per word width, for any number and shape of boxes.
//
// copy_boxes_body.h has the work of one thread. The boxes are a kernel argument if they fit into one. Otherwise they
// are in a table, which also has the first box of each thread block. The table is uploaded once and cached with the
// copy (copy_table.h). Later launches upload nothing, do not synchronize, and can be captured.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "program/copy_table.h"
#include "program/strided_copy.h"
#include "runtime/cuda/copy_boxes_body.h"
#include "runtime/cuda/lasting_memory.h"
#include "runtime/local_ops.h"

namespace shardwright {
namespace {

// The first driver version that supports kernel arguments of more than 4 KiB. Kernels for more than
// kInlineBoxesEverywhere boxes need such arguments. They do not compile for architectures before 7.0, so they are built
// only if no such architecture is among the targets.
constexpr int kMinDriverForLargeArguments = 12010;

#if CUDART_VERSION >= 12010 && defined(__CUDA_ARCH_LIST__)
// True if the code is built only for architectures of at least `least`, such as 700 for 7.0.
constexpr bool all_at_least(int least) {
  for (const int arch : {__CUDA_ARCH_LIST__}) {
    if (arch < least) return false;
  }
  return true;
}
constexpr bool kHasLargeArguments = all_at_least(700);
#else
constexpr bool kHasLargeArguments = false;
#endif

constexpr int kMaxInlineBoxes = kHasLargeArguments ? kInlineBoxes[std::size(kInlineBoxes) - 1] : kInlineBoxesEverywhere;
static_assert(sizeof(InlineTable<kInlineBoxesEverywhere>) <= 4000);
static_assert(sizeof(InlineTable<kInlineBoxes[std::size(kInlineBoxes) - 1]>) <= 32700);

// The kernel for boxes in its argument.
template <typename Word, int kBoxes>
__global__ void __launch_bounds__(kCopyThreads)
    copy_inline(const __grid_constant__ InlineTable<kBoxes> table, int64_t num_boxes, const Word* src, Word* dst) {
  copy_inline_words(blockIdx.x, static_cast<int>(threadIdx.x), table, num_boxes, src, dst);
}

// The kernel for boxes in a table in memory.
template <typename Word>
__global__ void __launch_bounds__(kCopyThreads) copy_by_table(const BoxTable table, const Word* src, Word* dst) {
  copy_table_words(blockIdx.x, static_cast<int>(threadIdx.x), table, src, dst);
}

// The operations of one device for tables (TableDevice in program/copy_table.h), on its current stream. Torch captures
// graphs in CUDA's global mode: meanwhile certain calls fail on every thread, unless the thread uses the relaxed mode.
class CudaTableDevice final : public TableDevice {
 public:
  explicit CudaTableDevice(at::Device device) : device_(device) {}

  bool is_capturing() override {
    return at::cuda::currentStreamCaptureStatusMayInitCtx() != at::cuda::CaptureStatus::None;
  }

  // Copies from pinned memory, which the allocator does not reuse before the copy is done.
  Upload upload(const std::vector<uint8_t>& bytes) override {
    const auto size = static_cast<int64_t>(bytes.size());
    const at::Tensor host = [size] {
      const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
      return at::empty({size}, at::TensorOptions(at::kByte).device(at::kCPU).pinned_memory(true));
    }();
    std::memcpy(host.mutable_data_ptr<uint8_t>(), bytes.data(), bytes.size());
    auto memory = std::make_shared<at::Tensor>(allocate_lasting(size, current_stream()));
    memory->copy_(host, /*non_blocking=*/true);
    auto event = std::make_shared<at::cuda::CUDAEvent>();
    event->record(current_stream());
    const void* begin = memory->const_data_ptr();
    return {std::move(memory), begin, std::move(event)};
  }

  // Copies on a stream that is not being captured, and waits for the copy.
  Upload upload_beside_capture(const std::vector<uint8_t>& bytes) override {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    const c10::cuda::CUDAStreamGuard guard(uncaptured_stream(bytes.size()));
    auto memory =
        std::make_shared<at::Tensor>(allocate_lasting(static_cast<int64_t>(bytes.size()), guard.current_stream()));
    C10_CUDA_CHECK(cudaMemcpyAsync(memory->mutable_data_ptr(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice,
                                   guard.current_stream()));
    C10_CUDA_CHECK(cudaStreamSynchronize(guard.current_stream()));
    const void* begin = memory->const_data_ptr();
    return {std::move(memory), begin, nullptr};
  }

  bool is_done(void* event) override {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    return static_cast<at::cuda::CUDAEvent*>(event)->query();
  }

  void wait(void* event) override {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    static_cast<at::cuda::CUDAEvent*>(event)->synchronize();
  }

  void block(void* event) override { static_cast<at::cuda::CUDAEvent*>(event)->block(current_stream()); }

  void note_use(const Upload& upload) override {
    static_cast<at::Tensor*>(upload.memory.get())->record_stream(current_stream());
  }

 private:
  c10::cuda::CUDAStream current_stream() const { return c10::cuda::getCurrentCUDAStream(device_.index()); }

  // Returns a stream of the pool that is not being captured. `num_bytes` is for the error message.
  c10::cuda::CUDAStream uncaptured_stream(size_t num_bytes) const {
    constexpr int kStreamsOfPool = 32;
    for (int i = 0; i < kStreamsOfPool; ++i) {
      const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_.index());
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
      if (status == cudaStreamCaptureStatusNone) return stream;
    }
    TORCH_CHECK(false, "shardwright: a copy cannot upload its table of ", num_bytes,
                " bytes in a CUDA graph capture, because all streams of the pool are captured; run the redistribute ",
                "once before the capture");
  }

  at::Device device_;
};

// True if driver and device support kernel arguments of more than 4 KiB.
bool supports_large_arguments() {
  static const bool has_driver = [] {
    int driver = 0;
    C10_CUDA_CHECK(cudaDriverGetVersion(&driver));
    return driver >= kMinDriverForLargeArguments;
  }();
  return has_driver && at::cuda::getCurrentDeviceProperties()->major >= 7;
}

// Returns the boxes, at most kBoxes, as a kernel argument.
template <int kBoxes>
InlineTable<kBoxes> inline_table(const WordBoxes& boxes) {
  InlineTable<kBoxes> table;
  std::copy(boxes.boxes.begin(), boxes.boxes.end(), table.boxes);
  std::copy(boxes.first_word.begin(), boxes.first_word.end(), table.first_word);
  return table;
}

// Launches the copy of boxes whose words have the width of `Word`.
template <typename Word>
void launch(const StridedCopy& copy, const WordBoxes& boxes, const void* src, void* dst, at::Device device) {
  const auto num_boxes = static_cast<int64_t>(boxes.boxes.size());
  const auto blocks = static_cast<unsigned>(num_copy_blocks(boxes.words()));
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream(device.index());
  const auto* from = static_cast<const Word*>(src);
  auto* to = static_cast<Word*>(dst);
  const auto by_table = [&] {
    CudaTableDevice table_device(device);
    const BoxTable table = table_on(table_device, device.index(), copy, boxes, kWordsPerBlock);
    copy_by_table<Word><<<blocks, kCopyThreads, 0, stream>>>(table, from, to);
  };
  const int max_inline_boxes = supports_large_arguments() ? kMaxInlineBoxes : kInlineBoxesEverywhere;
  const auto inlined = [&]<int kBoxes>(std::integral_constant<int, kBoxes>) {
    if constexpr (kBoxes <= kMaxInlineBoxes) {
      copy_inline<Word, kBoxes><<<blocks, kCopyThreads, 0, stream>>>(inline_table<kBoxes>(boxes), num_boxes, from, to);
    }
  };
  switch (inline_boxes_for(num_boxes, max_inline_boxes)) {
    case 8:
      inlined(std::integral_constant<int, 8>());
      break;
    case 16:
      inlined(std::integral_constant<int, 16>());
      break;
    case 32:
      inlined(std::integral_constant<int, 32>());
      break;
    case 64:
      inlined(std::integral_constant<int, 64>());
      break;
    case 144:
      inlined(std::integral_constant<int, 144>());
      break;
    default:
      by_table();
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// The DeviceCopy of CUDA.
void copy_on_cuda(const StridedCopy& copy, const at::Tensor& src, at::Tensor& dst) {
  const c10::cuda::CUDAGuard guard(dst.device());
  const void* from = src.const_data_ptr();
  void* to = dst.mutable_data_ptr();
  for (const WordBoxes& boxes : copy.at(from, to)) {
    switch (boxes.word_bytes) {
      case 1:
        launch<uint8_t>(copy, boxes, from, to, dst.device());
        break;
      case 2:
        launch<uint16_t>(copy, boxes, from, to, dst.device());
        break;
      case 4:
        launch<uint32_t>(copy, boxes, from, to, dst.device());
        break;
      case 8:
        launch<uint2>(copy, boxes, from, to, dst.device());
        break;
      default:
        launch<uint4>(copy, boxes, from, to, dst.device());
    }
  }
}

const bool kRegistered = register_device_copy(at::kCUDA, copy_on_cuda);

}  // namespace
}  // namespace shardwright
