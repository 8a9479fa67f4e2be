// Finishes asynchronous programs on CPU, whether or not anybody waits for them.
//
// One progress thread does this. It runs programs in the order in which they were started, and ends after a short idle
// time. A waiting thread does not depend on it: it runs the next instruction of its own program itself. A failure is
// stored with its program, and raised by every wait.
#pragma once

#include <memory>

namespace shardwright {

class Execution;

// Queues a program behind all programs that were queued before. Thread-safe.
void finish_on_progress_thread(std::shared_ptr<Execution> run);

// For the end of the process: waits at most this long until all programs are finished. Then keeps the thread from
// running any further instruction. Returns true if all programs were finished.
bool finish_programs(double timeout_seconds);

}  // namespace shardwright
