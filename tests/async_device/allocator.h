// The memory of the test device: a caching allocator that knows streams, as c10's for CUDA does.
//
// A block belongs to the stream that was current when it was made. Freed, it can be given out again on that stream at
// once, and is filled with poison in the stream's order: what still reads it without being ordered behind finds poison.
// A block that another stream was recorded to use comes back when that stream has come so far. While a graph is
// captured, its streams have a pool of their own, which the graph's replays go on using.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <string>

namespace async_device {

// 0xFF makes NaN of floats and -1 of integers; the other is a large negative number of both.
enum class Poison : uint8_t { kNan = 0xFF, kNumber = 0xCB };
void set_poison(Poison poison);

c10::Allocator* allocator();
// The stream uses the block as well, which is not to be given out again before.
void record_stream(const c10::DataPtr& data, c10::Stream stream);

// Waits for everything and gives cached blocks back to the system, but for those of graphs.
void empty_cache();
int64_t allocated_bytes();  // given out and not freed
int64_t peak_allocated_bytes();
void reset_peak();

}  // namespace async_device
