// Memory that a tensor has for a while: gathered weights lie in an arena, at another address after each gather, while
// autograd holds on to the same tensors and to views of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <string>

namespace shardwright {

// Makes the memory of `arena` from a byte on that of `tensor`. All views of `tensor` follow, those that autograd has
// saved included; version counters do not change. The arena lives while a tensor borrows from it. What `tensor` held is
// not copied. Throws c10::ValueError unless `tensor` is contiguous, begins its storage, and fits into the arena, which
// is flat, of bytes and on the same device.
void borrow_memory(const at::Tensor& tensor, const at::Tensor& arena, int64_t offset_bytes);

// Returns a tensor that borrows as a tensor with the same elements on the arena itself, and any other tensor as it is.
// An allocator knows the arena's memory, and not a place within it: recording a stream for a place does nothing with
// PyTorch's own allocator, and raises with cudaMallocAsync. Process groups record streams, so transfers get the result.
// The result keeps the arena alive.
at::Tensor on_arena(const at::Tensor& tensor);

// Keeps the memory of a tensor from being used again before everything is done that `stream` has been given so far. The
// memory of an arena is recorded for a tensor that borrows. Does nothing for memory that PyTorch's allocator of the
// device did not make: it is not used again, because whoever made it frees it.
void record_use(const at::Tensor& tensor, c10::Stream stream);

// Takes the memory away. Until `tensor` borrows again, an operator that asks for its address, or for that of a view of
// it, throws a c10::Error with the text `when_read`. A tensor without elements has no memory and may still be read.
void give_back_memory(const at::Tensor& tensor, const std::string& when_read);

}  // namespace shardwright
