#include "runtime/progress.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "runtime/execution.h"

namespace shardwright {
namespace {

// Idle time after which a progress thread ends. Creating a thread costs more than a small redistribute.
constexpr std::chrono::milliseconds kMaxIdle{50};

// The queues of programs, and the progress threads that run them. docs/architecture/runtime.md has a thread's states.
class Progress {
 public:
  // Queues a program, and starts the queue's thread if it does not run. Throws std::system_error, without queueing the
  // program, if the thread cannot be started.
  void add(const RankGroup* group, std::shared_ptr<Execution> execution) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Queue& queue = queues_[group];
    if (!queue.has_thread && !is_stopped_) {
      std::thread([this, group, &queue] { run(group, queue); }).detach();
      queue.has_thread = true;
    }
    queue.programs.push_back(std::move(execution));
    changed_.notify_all();
  }

  // See finish_programs.
  bool stop(double timeout_seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_done = [this] {
      return std::all_of(queues_.begin(), queues_.end(), [](const auto& entry) { return entry.second.is_idle(); });
    };
    const bool are_done = changed_.wait_for(lock, std::chrono::duration<double>(timeout_seconds), is_done);
    is_stopped_ = true;
    changed_.notify_all();
    return are_done;
  }

 private:
  // The programs of one group. `mutex_` guards all members.
  struct Queue {
    bool is_idle() const { return programs.empty() && !is_busy; }

    std::deque<std::shared_ptr<Execution>> programs;
    bool has_thread = false;
    bool is_busy = false;  // the thread runs a program that is no longer in `programs`
  };

  // A progress thread. It ends after stop(), or once its queue has been empty for kMaxIdle.
  void run(const RankGroup* group, Queue& queue) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (changed_.wait_for(lock, kMaxIdle, [&] { return !queue.programs.empty() || is_stopped_.load(); })) {
      if (is_stopped_) break;
      std::shared_ptr<Execution> execution = std::move(queue.programs.front());
      queue.programs.pop_front();
      queue.is_busy = true;
      lock.unlock();
      finish(*execution);
      execution.reset();  // may free tensors, so the lock is not held
      lock.lock();
      queue.is_busy = false;
      changed_.notify_all();
    }
    queue.has_thread = false;
    if (queue.programs.empty()) queues_.erase(group);
  }

  // Runs a program until it ends, fails or stop() is called.
  void finish(Execution& run) const {
    try {
      while (!run.finished() && !is_stopped_) run.run_next();
    } catch (const std::exception&) {
      return;  // the execution stores the failure; every later finish() raises it
    }
    if (run.finished()) run.release();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<const RankGroup*, Queue> queues_;  // by the first group of a program; references stay valid
  std::atomic<bool> is_stopped_{false};
};

// Threads do not survive a fork, so a child process gets a new instance. Instances are never destroyed, because threads
// may still run at exit.
Progress& progress() {
  static std::mutex mutex;
  static Progress* instance = nullptr;
  static pid_t process = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (process != getpid()) {
    instance = new Progress;
    process = getpid();
  }
  return *instance;
}

}  // namespace

void finish_on_progress_thread(const RankGroup* group, std::shared_ptr<Execution> run) {
  progress().add(group, std::move(run));
}

bool finish_programs(double timeout_seconds) { return progress().stop(timeout_seconds); }

}  // namespace shardwright
