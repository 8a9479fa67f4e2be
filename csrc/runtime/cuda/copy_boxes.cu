// Packing and unpacking on the GPU: one launch per width of words, whatever the number of boxes and their shapes.
//
// All words of a copy are numbered (strided_copy.h). A thread block takes kWordsPerBlock numbers, finds the box of the
// first one, and each thread loads its words before it stores any, so that several loads are under way. Few boxes
// travel as a kernel argument. For many, a table is uploaded once and kept with the copy: later launches upload and
// synchronise nothing, and can be captured in a CUDA graph.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "program/strided_copy.h"
#include "runtime/local_ops.h"

namespace shardwright {
namespace {

constexpr int kThreads = 256;
constexpr int kWordsPerThread = 4;
constexpr int kWordsPerBlock = kThreads * kWordsPerThread;
constexpr int kInlineBoxes = 16;  // 16 * 216 bytes stay below the 4 KiB of kernel arguments that every GPU takes

struct InlineTable {
  WordBox boxes[kInlineBoxes];
  int64_t first_word[kInlineBoxes + 1];
};
static_assert(sizeof(InlineTable) <= 4000);

template <typename Word>
__device__ __forceinline__ void copy_words(const WordBox* boxes, const int64_t* first_word, int64_t num_boxes,
                                           const Word* __restrict__ src, Word* __restrict__ dst) {
  const int64_t words = first_word[num_boxes];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kWordsPerBlock;
  const int64_t first = box_of(first_word, num_boxes, begin);
  const int64_t last = box_of(first_word, num_boxes, min(begin + kWordsPerBlock, words) - 1);
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

template <typename Word>
__global__ void __launch_bounds__(kThreads)
    copy_inline(const __grid_constant__ InlineTable table, int64_t num_boxes, const Word* src, Word* dst) {
  copy_words(table.boxes, table.first_word, num_boxes, src, dst);
}

template <typename Word>
__global__ void __launch_bounds__(kThreads)
    copy_by_table(const WordBox* boxes, const int64_t* first_word, int64_t num_boxes, const Word* src, Word* dst) {
  copy_words(boxes, first_word, num_boxes, src, dst);
}

// WordBoxes in the memory of one device: the boxes, then where they begin.
struct DeviceTable {
  at::Tensor bytes;
  const WordBox* boxes = nullptr;
  const int64_t* first_word = nullptr;
  at::cuda::CUDAEvent uploaded;
  bool is_there = false;  // seen to be
};

void check_not_capturing(const WordBoxes& boxes) {
  TORCH_CHECK(at::cuda::currentStreamCaptureStatusMayInitCtx() == at::cuda::CaptureStatus::None,
              "shardwright: a copy of ", boxes.boxes.size(),
              " boxes runs for the first time while a CUDA graph is captured; run the redistribute once before");
}

// From pinned memory, which the allocator keeps until the copy is done.
std::shared_ptr<DeviceTable> upload(const WordBoxes& boxes, at::Device device) {
  check_not_capturing(boxes);
  const size_t box_bytes = boxes.boxes.size() * sizeof(WordBox);
  const size_t word_bytes = boxes.first_word.size() * sizeof(int64_t);
  at::Tensor host = at::empty({static_cast<int64_t>(box_bytes + word_bytes)},
                              at::TensorOptions(at::kByte).device(at::kCPU).pinned_memory(true));
  auto* bytes = host.mutable_data_ptr<uint8_t>();
  std::memcpy(bytes, boxes.boxes.data(), box_bytes);
  std::memcpy(bytes + box_bytes, boxes.first_word.data(), word_bytes);
  auto table = std::make_shared<DeviceTable>();
  table->bytes = host.to(device, at::kByte, /*non_blocking=*/true);
  table->uploaded.record(at::cuda::getCurrentCUDAStream(device.index()));
  const auto* begin = table->bytes.const_data_ptr<uint8_t>();
  table->boxes = reinterpret_cast<const WordBox*>(begin);
  table->first_word = reinterpret_cast<const int64_t*>(begin + box_bytes);
  return table;
}

// Kept by the copy. Streams other than the one that uploads it wait for that, until it has been seen to be done.
const DeviceTable& table_of(const StridedCopy& copy, const WordBoxes& boxes, at::Device device) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<void>& kept = copy.device_table(boxes, device.index());
  if (!kept) kept = upload(boxes, device);
  auto& table = *static_cast<DeviceTable*>(kept.get());
  table.is_there = table.is_there || table.uploaded.query();
  if (!table.is_there) {
    check_not_capturing(boxes);
    table.uploaded.block(at::cuda::getCurrentCUDAStream(device.index()));
  }
  return table;
}

template <typename Word>
void launch(const StridedCopy& copy, const WordBoxes& boxes, const void* src, void* dst, at::Device device) {
  const auto num_boxes = static_cast<int64_t>(boxes.boxes.size());
  const auto blocks = static_cast<unsigned>((boxes.words() + kWordsPerBlock - 1) / kWordsPerBlock);
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream(device.index());
  const auto* from = static_cast<const Word*>(src);
  auto* to = static_cast<Word*>(dst);
  if (num_boxes <= kInlineBoxes) {
    InlineTable table;
    std::copy(boxes.boxes.begin(), boxes.boxes.end(), table.boxes);
    std::copy(boxes.first_word.begin(), boxes.first_word.end(), table.first_word);
    copy_inline<Word><<<blocks, kThreads, 0, stream>>>(table, num_boxes, from, to);
  } else {
    const DeviceTable& table = table_of(copy, boxes, device);
    copy_by_table<Word><<<blocks, kThreads, 0, stream>>>(table.boxes, table.first_word, num_boxes, from, to);
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
