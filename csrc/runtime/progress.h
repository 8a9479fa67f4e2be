// Takes asynchronous programs on CPU to their ends, whether or not anybody waits for them.
//
// One thread does, which lives while there is something to do. It takes programs in the order in which they were
// started; a waiter does not depend on it, but does the next instruction of its own program itself. What fails is kept
// with the program, and raised to whoever waits.
#pragma once

#include <memory>

namespace shardwright {

class Execution;

// Behind all that were given before. Thread-safe.
void finish_on_progress_thread(std::shared_ptr<Execution> execution);

// For the end of the process: waits until all programs are finished, at most this long, and keeps the thread from
// beginning any further instruction. True if all were.
bool finish_programs(double timeout_seconds);

}  // namespace shardwright
