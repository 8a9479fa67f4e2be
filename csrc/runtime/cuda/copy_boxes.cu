// Packing and unpacking on the GPU: one launch per kMaxBoxes boxes, whatever their shapes. The boxes travel as a kernel
// argument, so nothing is uploaded or synchronised and a launch can be captured in a CUDA graph.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "runtime/local_ops.h"

namespace shardwright {
namespace {

constexpr int kMaxDims = 6;
constexpr int kMaxBoxes = 16;  // 16 * 168 bytes stay below the 4 KiB of kernel arguments that every GPU takes
constexpr int kThreads = 256;

struct DeviceBox {
  int64_t src_offset;
  int64_t dst_offset;
  int64_t count;
  int64_t sizes[kMaxDims];
  int64_t src_strides[kMaxDims];
  int64_t dst_strides[kMaxDims];
};

struct Batch {
  int ndim;  // of the box with most dims; the others have sizes of 1 in front
  DeviceBox boxes[kMaxBoxes];
};

template <typename Item>
__global__ void copy_batch(const Batch batch, const Item* __restrict__ src, Item* __restrict__ dst) {
  const DeviceBox& box = batch.boxes[blockIdx.y];
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < box.count; i += step) {
    int64_t rest = i;
    int64_t from = box.src_offset;
    int64_t to = box.dst_offset;
    for (int d = batch.ndim - 1; d >= 0; --d) {
      const int64_t at = rest % box.sizes[d];
      rest /= box.sizes[d];
      from += at * box.src_strides[d];
      to += at * box.dst_strides[d];
    }
    dst[to] = src[from];
  }
}

DeviceBox to_device(const Box& box, int ndim) {
  DeviceBox out{};
  out.src_offset = box.src_offset;
  out.dst_offset = box.dst_offset;
  out.count = 1;
  const int missing = ndim - static_cast<int>(box.sizes.size());
  for (int d = 0; d < ndim; ++d) {
    const bool given = d >= missing;
    out.sizes[d] = given ? box.sizes[d - missing] : 1;
    out.src_strides[d] = given ? box.src_strides[d - missing] : 0;
    out.dst_strides[d] = given ? box.dst_strides[d - missing] : 0;
    out.count *= out.sizes[d];
  }
  return out;
}

template <typename Item>
void launch(const Batch& batch, int num_boxes, const at::Tensor& src, at::Tensor& dst) {
  int64_t largest = 1;
  for (int b = 0; b < num_boxes; ++b) largest = std::max(largest, batch.boxes[b].count);
  const int64_t wanted = (largest + kThreads - 1) / kThreads;
  const int64_t wave = static_cast<int64_t>(at::cuda::getCurrentDeviceProperties()->multiProcessorCount) * 8;
  const dim3 grid(static_cast<unsigned>(std::min(wanted, wave)), static_cast<unsigned>(num_boxes));
  copy_batch<Item><<<grid, kThreads, 0, at::cuda::getCurrentCUDAStream()>>>(
      batch, static_cast<const Item*>(src.const_data_ptr()), static_cast<Item*>(dst.mutable_data_ptr()));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

bool copy_on_cuda(const std::vector<Box>& boxes, const at::Tensor& src, at::Tensor& dst) {
  size_t ndim = 1;
  for (const Box& box : boxes) ndim = std::max(ndim, box.sizes.size());
  if (ndim > kMaxDims) return false;
  const c10::cuda::CUDAGuard guard(dst.device());
  for (size_t begin = 0; begin < boxes.size(); begin += kMaxBoxes) {
    const int num_boxes = static_cast<int>(std::min<size_t>(kMaxBoxes, boxes.size() - begin));
    Batch batch{};
    batch.ndim = static_cast<int>(ndim);
    for (int b = 0; b < num_boxes; ++b) batch.boxes[b] = to_device(boxes[begin + b], batch.ndim);
    switch (dst.element_size()) {
      case 1:
        launch<uint8_t>(batch, num_boxes, src, dst);
        break;
      case 2:
        launch<uint16_t>(batch, num_boxes, src, dst);
        break;
      case 4:
        launch<uint32_t>(batch, num_boxes, src, dst);
        break;
      case 8:
        launch<uint64_t>(batch, num_boxes, src, dst);
        break;
      case 16:
        launch<ulonglong2>(batch, num_boxes, src, dst);
        break;
      default:
        return false;
    }
  }
  return true;
}

const bool kRegistered = register_device_copy(at::kCUDA, copy_on_cuda);

}  // namespace
}  // namespace shardwright
