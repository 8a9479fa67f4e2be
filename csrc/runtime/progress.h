// Finishes asynchronous programs on CPU, whether or not anybody waits for them.
//
// One thread does this. It takes programs in the order in which they were started, and ends when it has been idle for a
// moment. A waiter does not depend on it, but runs the next instruction of its own program itself. A failure is kept
// with its program, and raised in whoever waits.
#pragma once

#include <memory>

namespace shardwright {

class Execution;

// The program runs after all programs that were given before. Thread-safe.
void finish_on_progress_thread(std::shared_ptr<Execution> run);

// For the end of the process: waits at most this long until all programs are finished, then keeps the thread from
// beginning any further instruction. Returns whether all were finished.
bool finish_programs(double timeout_seconds);

}  // namespace shardwright
