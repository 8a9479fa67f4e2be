// Finishes asynchronous programs on CPU, even if nobody waits for them.
//
// One progress thread runs the programs in the order in which they were started, and ends after a short idle time. A
// thread that waits for a program does not depend on the progress thread: it runs the program's next instructions
// itself. The error of a failed program is stored in its Execution and raised by every wait.
#pragma once

#include <memory>

namespace shardwright {

class Execution;

// Queues a program behind all programs that were queued before. Thread-safe.
void finish_on_progress_thread(std::shared_ptr<Execution> run);

// For the end of the process: waits until all programs are finished, at most `timeout_seconds`. Afterwards the progress
// thread runs no further instruction. Returns true if all programs finished or failed in time.
bool finish_programs(double timeout_seconds);

}  // namespace shardwright
