// PyTorch's symmetric memory on the device of driver.h: memory that processes share, and signals between them that are
// given to streams, as CUDA's.
//
// - Fresh memory holds 0xFF, so that what is read before it was written shows. Signals begin unset.
// - A signal to put waits until the last one on the channel was taken; one to wait for waits until it was put, and
// takes
//   it. Both do so on the current stream, also in replays of a graph.
// - A signal that does not come in time fails the stream, as a kernel that traps does, and ends all later ones at once.
// - Letting go of memory waits for the device first. What others have mapped stays theirs.
#pragma once

#include <cstdint>

namespace async_device {

void register_symmetric_memory();

// Signals from now on that this process does not put, the next one being number 1; for tests of what comes then.
void lose_signal(int64_t number);

}  // namespace async_device
