// The memory of the test device: a caching allocator that knows streams, as c10's for CUDA does.
//
// A block belongs to the stream that was current when it was made. Once freed, it can be reused on that stream at once,
// and is filled with poison in the stream's order, so that work that still reads it without being ordered finds poison.
// If another stream was recorded to use a block, the block is reused once that stream has reached this point. While a
// graph is captured, its streams have their own pool, which the graph's replays go on using.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <string>

namespace async_device {

// 0xFF is NaN for floats and -1 for integers; the other is a large negative number for both.
enum class Poison : uint8_t { kNan = 0xFF, kNumber = 0xCB };
void set_poison(Poison poison);

c10::Allocator* allocator();
// Records that the stream uses the block too, so that the block is not reused before the stream is done with it.
// Memory that this allocator did not make, or a place within a block, is left alone, as c10's allocator does, or is an
// error, as with cudaMallocAsync.
void record_stream(const c10::DataPtr& data, c10::Stream stream);
void refuse_unknown_memory(bool refuses);

// Pinned memory of the host. Copies between it and the device that need not block leave the host to go on, as on CUDA:
// they read or write it in the stream's order. It is filled with poison when it is allocated.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

// Waits for everything and returns cached blocks to the system, except those of graphs.
void empty_cache();
int64_t allocated_bytes();  // given out and not freed
int64_t peak_allocated_bytes();
void reset_peak();

}  // namespace async_device
