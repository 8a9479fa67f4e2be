// Arena views: tensors whose storage is a range of a shared arena. A gathered weight gets a new range for each gather,
// while autograd keeps the same tensor and views of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <string>

namespace shardwright {

// Makes `tensor` an arena view: its storage becomes the bytes of `arena` from `offset_bytes` on. Views of `tensor`
// follow, including those that autograd has saved; version counters do not change. The previous content is not copied.
// The arena lives as long as one of its views. Throws c10::ValueError unless `tensor` is contiguous, begins its
// storage, and fits into the arena at that offset; `arena` must be flat, of bytes and on the same device.
void view_arena(const at::Tensor& tensor, const at::Tensor& arena, int64_t offset_bytes);

// If `tensor` is an arena view, returns a tensor of the same elements whose storage is the whole arena; otherwise
// returns `tensor`. The result keeps the arena alive. Transfers use the result, because process groups record streams
// by the address of the storage, and allocators know only the arena's first address. With any other address, recording
// does nothing in PyTorch's own allocator and raises in cudaMallocAsync.
at::Tensor on_arena(const at::Tensor& tensor);

// Prevents reuse of a tensor's memory (for an arena view: the arena's) until `stream` finishes its queued work. Does
// nothing for memory that PyTorch's allocator for the device did not allocate, because the memory's owner frees it.
void record_use(const at::Tensor& tensor, c10::Stream stream);

// Takes the memory from `tensor`. Until it is an arena view again, an operator that reads its address, or the address
// of a view of it, throws c10::Error with the text `when_read`. A tensor without elements has no memory and may still
// be read.
void release_memory(const at::Tensor& tensor, const std::string& when_read);

}  // namespace shardwright
