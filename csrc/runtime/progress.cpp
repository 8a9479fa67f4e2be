#include "runtime/progress.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "runtime/execution.h"

namespace shardwright {
namespace {

// Idle time after which the progress thread ends. Creating a thread costs more than a small redistribute.
constexpr std::chrono::milliseconds kMaxIdle{50};

// The queue of programs, and the progress thread that runs them. docs/architecture/runtime.md has its states.
class Progress {
 public:
  // Queues a program, and starts the thread if it does not run.
  void add(std::shared_ptr<Execution> execution) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(execution));
    if (!is_running_ && !is_stopped_) {
      is_running_ = true;
      std::thread([this] { run(); }).detach();
    }
    changed_.notify_all();
  }

  // See finish_programs.
  bool stop(double timeout_seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool is_done = changed_.wait_for(lock, std::chrono::duration<double>(timeout_seconds),
                                           [this] { return queue_.empty() && !is_busy_; });
    is_stopped_ = true;
    changed_.notify_all();
    return is_done;
  }

 private:
  // The progress thread. It ends after stop(), or once the queue has been empty for kMaxIdle.
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (changed_.wait_for(lock, kMaxIdle, [this] { return !queue_.empty() || is_stopped_.load(); })) {
      if (is_stopped_) break;
      std::shared_ptr<Execution> execution = std::move(queue_.front());
      queue_.pop_front();
      is_busy_ = true;
      lock.unlock();
      finish(*execution);
      execution.reset();  // may free tensors, so the lock is not held
      lock.lock();
      is_busy_ = false;
      changed_.notify_all();
    }
    is_running_ = false;
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
  std::deque<std::shared_ptr<Execution>> queue_;
  bool is_running_ = false;
  bool is_busy_ = false;  // the thread runs a program that is no longer in queue_
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

void finish_on_progress_thread(std::shared_ptr<Execution> run) { progress().add(std::move(run)); }

bool finish_programs(double timeout_seconds) { return progress().stop(timeout_seconds); }

}  // namespace shardwright
