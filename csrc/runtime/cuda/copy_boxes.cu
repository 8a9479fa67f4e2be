// Packing and unpacking on the GPU: one launch per width of words, whatever the number of boxes and their shapes.
//
// All words of a copy are numbered (strided_copy.h). A thread block takes kWordsPerBlock numbers and finds the box of
// the first one. Each thread loads all its words before it stores any, so that several loads are in flight. Boxes are
// passed as a kernel argument if they fit. If not, a table is uploaded once and kept with the copy (copy_table.h); it
// also says in which box each block begins. Later launches then upload and synchronise nothing, and can be captured.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <cstring>

#include "program/copy_table.h"
#include "program/strided_copy.h"
#include "runtime/local_ops.h"

namespace shardwright {
namespace {

constexpr int kThreads = 256;
constexpr int kWordsPerThread = 4;
constexpr int kWordsPerBlock = kThreads * kWordsPerThread;

// Kernel arguments may have 4 KiB on every GPU, and 32,764 bytes on compute capability 7.0 and newer with CUDA 12.1 and
// its drivers. The larger kernel is not built if an older architecture is among the targets, because it would not
// compile.
constexpr int kFewBoxes = 16;
constexpr int kInlineBoxes = 144;
constexpr int kDriverForLargeArguments = 12010;

#if CUDART_VERSION >= 12010 && defined(__CUDA_ARCH_LIST__)
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

template <int kBoxes>
struct InlineTable {
  WordBox boxes[kBoxes];
  int64_t first_word[kBoxes + 1];
};
static_assert(sizeof(InlineTable<kFewBoxes>) <= 4000);
static_assert(sizeof(InlineTable<kInlineBoxes>) <= 32700);

template <typename Word>
__device__ __forceinline__ void copy_words(const WordBox* boxes, const int64_t* first_word, int64_t words,
                                           int64_t first, int64_t last, const Word* __restrict__ src,
                                           Word* __restrict__ dst) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kWordsPerBlock;
  Word loaded[kWordsPerThread];
  int64_t places[kWordsPerThread];
#pragma unroll
  for (int w = 0; w < kWordsPerThread; ++w) {
    const int64_t word = begin + w * kThreads + threadIdx.x;
    places[w] = -1;
    if (word >= words) continue;
    const int64_t b = first + box_of(first_word + first, last - first + 1, word);
    int64_t from;
    boxes[b].locate(static_cast<uint32_t>(word - first_word[b]), from, places[w]);
    loaded[w] = src[from];
  }
#pragma unroll
  for (int w = 0; w < kWordsPerThread; ++w) {
    if (places[w] >= 0) dst[places[w]] = loaded[w];
  }
}

template <typename Word, int kBoxes>
__global__ void __launch_bounds__(kThreads)
    copy_inline(const __grid_constant__ InlineTable<kBoxes> table, int64_t num_boxes, const Word* src, Word* dst) {
  const int64_t words = table.first_word[num_boxes];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kWordsPerBlock;
  const int64_t first = box_of(table.first_word, num_boxes, begin);
  const int64_t last = box_of(table.first_word, num_boxes, min(begin + kWordsPerBlock, words) - 1);
  copy_words(table.boxes, table.first_word, words, first, last, src, dst);
}

template <typename Word>
__global__ void __launch_bounds__(kThreads) copy_by_table(const BoxTable table, const Word* src, Word* dst) {
  copy_words(table.boxes, table.first_word, table.first_word[table.num_boxes], table.first_box[blockIdx.x],
             table.first_box[blockIdx.x + 1], src, dst);
}

// The operations of one device, on its current stream. Queries that the host must not make while any stream of the
// process is captured in the global mode, as torch's graphs are, are made in this thread's relaxed mode.
class CudaTables final : public TableDevice {
 public:
  explicit CudaTables(at::Device device) : device_(device) {}

  bool is_capturing() override {
    return at::cuda::currentStreamCaptureStatusMayInitCtx() != at::cuda::CaptureStatus::None;
  }

  // Uploads from pinned memory, which the allocator keeps until the copy is done.
  Upload upload(const std::vector<uint8_t>& bytes) override {
    const auto size = static_cast<int64_t>(bytes.size());
    const at::Tensor host = at::empty({size}, at::TensorOptions(at::kByte).device(at::kCPU).pinned_memory(true));
    std::memcpy(host.mutable_data_ptr<uint8_t>(), bytes.data(), bytes.size());
    auto memory = std::make_shared<at::Tensor>(host.to(device_, at::kByte, /*non_blocking=*/true));
    auto event = std::make_shared<at::cuda::CUDAEvent>();
    event->record(current_stream());
    const void* begin = memory->const_data_ptr();
    return {std::move(memory), begin, std::move(event)};
  }

  // Uses a stream that is not being captured. Memory is allocated on it too, and so does not come from a graph's pool.
  Upload upload_beside_capture(const std::vector<uint8_t>& bytes) override {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    const c10::cuda::CUDAStreamGuard guard(uncaptured_stream(bytes.size()));
    auto memory = std::make_shared<at::Tensor>(
        at::empty({static_cast<int64_t>(bytes.size())}, at::TensorOptions(at::kByte).device(device_)));
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

  c10::cuda::CUDAStream uncaptured_stream(size_t num_bytes) const {
    constexpr int kStreamsOfPool = 32;
    for (int i = 0; i < kStreamsOfPool; ++i) {
      const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_.index());
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
      if (status == cudaStreamCaptureStatusNone) return stream;
    }
    TORCH_CHECK(false, "shardwright: a copy runs for the first time while a CUDA graph is captured, and its table of ",
                num_bytes, " bytes cannot be uploaded, because all streams of the pool are captured; run the ",
                "redistribute once before the capture");
  }

  at::Device device_;
};

bool takes_large_arguments() {
  static const bool has_driver = [] {
    int driver = 0;
    C10_CUDA_CHECK(cudaDriverGetVersion(&driver));
    return driver >= kDriverForLargeArguments;
  }();
  return has_driver && at::cuda::getCurrentDeviceProperties()->major >= 7;
}

template <int kBoxes>
InlineTable<kBoxes> inline_table(const WordBoxes& boxes) {
  InlineTable<kBoxes> table;
  std::copy(boxes.boxes.begin(), boxes.boxes.end(), table.boxes);
  std::copy(boxes.first_word.begin(), boxes.first_word.end(), table.first_word);
  return table;
}

template <typename Word>
void launch(const StridedCopy& copy, const WordBoxes& boxes, const void* src, void* dst, at::Device device) {
  const auto num_boxes = static_cast<int64_t>(boxes.boxes.size());
  const auto blocks = static_cast<unsigned>((boxes.words() + kWordsPerBlock - 1) / kWordsPerBlock);
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream(device.index());
  const auto* from = static_cast<const Word*>(src);
  auto* to = static_cast<Word*>(dst);
  const auto by_table = [&] {
    CudaTables tables(device);
    const BoxTable table = table_on(tables, device.index(), copy, boxes, kWordsPerBlock);
    copy_by_table<Word><<<blocks, kThreads, 0, stream>>>(table, from, to);
  };
  if (num_boxes <= kFewBoxes) {
    copy_inline<Word, kFewBoxes><<<blocks, kThreads, 0, stream>>>(inline_table<kFewBoxes>(boxes), num_boxes, from, to);
  } else if constexpr (kHasLargeArguments) {
    if (num_boxes <= kInlineBoxes && takes_large_arguments()) {
      copy_inline<Word, kInlineBoxes>
          <<<blocks, kThreads, 0, stream>>>(inline_table<kInlineBoxes>(boxes), num_boxes, from, to);
    } else {
      by_table();
    }
  } else {
    by_table();
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

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
