// PyTorch's symmetric memory on the device of driver.h: memory that processes share, and signals between them that run
// on streams, like CUDA's.
//
// - Fresh memory holds 0xFF, so that reads before the first write are detected. Signals begin unset.
// - Putting a signal waits until the last one on the channel was taken. Waiting for a signal waits until it is put, and
//   takes it. Both happen on the current stream, also in replays of a graph.
// - A signal that misses its timeout fails the stream, like a kernel that traps, and ends all later signals at once.
// - Freeing memory waits for the device first. Other processes keep their mappings.
#pragma once

#include <cstdint>

namespace async_device {

void register_symmetric_memory();

// Drops the n-th signal that this process puts from now on (1 is the next one), to test failures.
void lose_signal(int64_t number);
// The same for flags that streams set (flag_product.cpp).
void lose_flag(int64_t number);

// Signals are kernels. This waits, on the thread of their stream, while a product with flags holds all multiprocessors.
void wait_for_multiprocessor();

}  // namespace async_device
