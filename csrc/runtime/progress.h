// Takes asynchronous programs on CPU to their ends, whether or not anybody waits for them.
//
// One thread does this. It takes programs in the order in which they were started, and ends when it has had nothing to
// do for a moment. A waiter does not depend on it, but runs the next instruction of its own program itself. A failure
// is kept with its program, and raised in whoever waits.
#pragma once

#include <memory>

namespace shardwright {

class Execution;

// Runs after all programs that were given before. Thread-safe.
void finish_on_progress_thread(std::shared_ptr<Execution> execution);

// For the end of the process: waits until all programs are finished, at most this long, and then keeps the thread from
// beginning any further instruction. True if all were finished.
bool finish_programs(double timeout_seconds);

}  // namespace shardwright
