// Arena views: tensors whose memory is a range of an arena, which is one large allocation for many tensors. A gathered
// weight gets a range of the arena at each gather, while autograd keeps the same tensor and views of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <string>

namespace shardwright {

// Makes `tensor` an arena view: from now on its storage is the bytes of `arena` from `offset_bytes` on. This also
// applies to all views of `tensor`, including those that autograd has saved. Version counters do not change, and the
// previous content is not copied. The arena lives as long as one of its views. Throws c10::ValueError unless `tensor`
// is contiguous, begins its storage and fits into the arena at that offset, `offset_bytes` is a multiple of the
// tensor's element size, and `arena` is contiguous, of dtype uint8 and on the same device.
void view_arena(const at::Tensor& tensor, const at::Tensor& arena, int64_t offset_bytes);

// If `tensor` is an arena view, returns a tensor of the same elements whose storage is the whole arena; otherwise
// returns `tensor`. The result keeps the arena alive. Transfers use the result: process groups record streams by the
// address of the storage, and allocators know only the arena's first address. For any other address, recording does
// nothing in PyTorch's own allocator and raises in cudaMallocAsync.
at::Tensor on_arena(const at::Tensor& tensor);

// Tells the allocator that `stream` uses a tensor's memory (for an arena view: the arena's), so that the memory is not
// reused before the stream has finished its queued work. Does nothing for memory that PyTorch's allocator for the
// device did not allocate.
void record_use(const at::Tensor& tensor, c10::Stream stream);

// Drops the memory of `tensor`. Until view_arena is called for the tensor, an operator that reads the address of the
// tensor or of one of its views throws c10::Error with the text `when_read`. A tensor without elements may still be
// read.
void release_memory(const at::Tensor& tensor, const std::string& when_read);

}  // namespace shardwright
