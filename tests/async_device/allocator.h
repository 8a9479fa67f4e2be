// The memory of the test device: a caching allocator with streams, like c10's for CUDA.
//
// A block belongs to the stream that was current at its allocation. Once freed, it can be reused on that stream at
// once, and is filled with poison in the stream's order, so that unordered work that still reads it finds poison. If
// another stream was recorded to use a block, the block is reused once that stream has reached this point. During the
// capture of a graph, its streams have their own pool, which the graph's replays continue to use.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <string>

namespace async_device {

// 0xFF is NaN for floats and -1 for integers; 0xCB is a large negative number for both.
enum class Poison : uint8_t { kNan = 0xFF, kNumber = 0xCB };
void set_poison(Poison poison);

c10::Allocator* allocator();
// Records that the stream uses the block too, so that the block is not reused before the stream is done with it. For
// memory of other allocators, or a place within a block, does nothing, like c10's allocator, or throws if
// refuse_unknown_memory is set, like cudaMallocAsync.
void record_stream(const c10::DataPtr& data, c10::Stream stream);
void refuse_unknown_memory(bool refuses);

// Pinned memory of the host. As on CUDA, non-blocking copies between it and the device do not block the host: they read
// or write it in the stream's order. It is filled with poison when it is allocated.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

// Waits for all work and returns cached blocks to the system, except those of graphs.
void empty_cache();
int64_t allocated_bytes();  // allocated and not freed
int64_t peak_allocated_bytes();
void reset_peak();

}  // namespace async_device
