#include "runtime/flag_watch.h"

#include <c10/core/DeviceGuard.h>

#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "runtime/flag_product.h"

namespace shardwright {
namespace {

using Clock = std::chrono::steady_clock;

// The products to check, and the thread that checks each one at its deadline.
class Watch {
 public:
  // Adds a product (see watch_product), and starts the thread at the first call.
  void add(c10::Event end, std::chrono::milliseconds timeout, std::function<std::string()> make_message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    remove_ended();
    products_.push_back({std::move(end), Clock::now() + timeout, timeout, std::move(make_message)});
    if (!std::exchange(is_running_, true)) std::thread([this] { run(); }).detach();
    changed_.notify_one();
  }

 private:
  struct Product {
    c10::Event end;
    Clock::time_point deadline;
    std::chrono::milliseconds timeout;  // for the message
    std::function<std::string()> make_message;
  };

  // True if the device has finished a product or has failed.
  static bool has_ended(const Product& product) {
    try {
      return is_done(product.end);
    } catch (const std::exception&) {
      return true;  // the device has failed; its next call reports that
    }
  }

  // Removes the products that have ended.
  void remove_ended() {
    products_.remove_if([](const Product& product) { return has_ended(product); });
  }

  // The body of the thread: checks products at their deadlines, forever.
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      auto next = products_.begin();
      for (auto product = products_.begin(); product != products_.end(); ++product) {
        if (product->deadline < next->deadline) next = product;
      }
      if (next == products_.end()) {
        changed_.wait(lock);
      } else if (Clock::now() < next->deadline) {
        changed_.wait_until(lock, Clock::time_point(next->deadline));
      } else {
        // Calls for the event would otherwise make a context on device 0, which is current on a new thread.
        const c10::OptionalDeviceGuard on_device(next->end.device());
        if (!has_ended(*next)) end_process(*next);
        products_.erase(next);
      }
    }
  }

  // Writes the error message of a product and aborts the process.
  [[noreturn]] static void end_process(const Product& product) {
    std::cerr << product.make_message() << "\nIt was submitted " << product.timeout.count()
              << " ms ago, which is the timeout of its group. The process ends, because the device would wait forever."
              << std::endl;
    std::abort();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Product> products_;
  bool is_running_ = false;
};

}  // namespace

void watch_product(c10::Event end, std::chrono::milliseconds timeout, std::function<std::string()> make_message) {
  static auto* watch = new Watch;  // never destroyed: its thread may outlive statics
  if (timeout.count() > 0) watch->add(std::move(end), timeout, std::move(make_message));
}

}  // namespace shardwright
