// Finishes asynchronous programs on CPU, even if nobody waits for them.
//
// Each group of ranks has a queue of programs, and a progress thread that runs them in the order in which they were
// started. The thread ends after a short idle time. Programs on different groups do not wait for each other, because
// another rank may have started them in another order. A thread that waits for a program does not depend on a progress
// thread: it runs the program's next instructions itself. The error of a failed program is stored in its Execution and
// raised by every wait.
#pragma once

#include <memory>

namespace shardwright {

class Execution;
class RankGroup;

// Queues a program behind all programs that were queued before with the same `group`: the first group that the program
// uses, or null if it uses none. Thread-safe.
void finish_on_progress_thread(const RankGroup* group, std::shared_ptr<Execution> run);

// For the end of the process: waits until all programs are finished, at most `timeout_seconds`. Afterwards the progress
// threads run no further instruction. Returns true if all programs finished or failed in time.
bool finish_programs(double timeout_seconds);

}  // namespace shardwright
