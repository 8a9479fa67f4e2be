// What the ranks of a strict process group share once all of them have come together: the order of their operations,
// and a way for data, which is Gloo's messages. Everything else of process_group.h is made of these.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace async_device {

using Milliseconds = std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

enum class Kind : int64_t {
  kMessages,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kBroadcast,
  kAllGather,
  kAllToAll,
  kGather,
  kScatter,
  kBarrier
};
const char* name_of(Kind kind);

// One rank's place in a group. Errors name ranks by their numbers in the default group.
struct Place {
  std::string group;
  int rank = 0;
  int size = 1;
  std::vector<int64_t> global_ranks;  // empty: the group is the default one

  int64_t global(int group_rank) const;
  std::string text() const;
  std::string text(const std::vector<int>& group_ranks) const;  // "rank 3", "ranks 0 and 2"
};

// Blocks the host until all ranks of the group have called it with this `key`, once per key and store, and returns
// their values by rank. Throws c10::DistBackendError that names the missing ranks after `timeout`, and one if the store
// knows the key from before. `purpose` completes "... needs all ranks of the group".
std::vector<std::string> meet(const StorePtr& store, const Place& place, const std::string& key,
                              const std::string& value, const std::string& purpose, Milliseconds timeout);

// Memory of the device, without owning it.
struct Memory {
  char* data = nullptr;
  int64_t count = 0;
  at::ScalarType dtype = at::kByte;

  static Memory of(const at::Tensor& tensor);
  int64_t bytes() const;
  Memory part(int64_t first, int64_t num) const;
  at::Tensor as_cpu() const;  // the same memory
  at::Tensor as_bytes() const;
};

struct Message {
  int peer = 0;
  Memory memory;
};

// What one rank sends, receives and copies in one operation.
struct Moves {
  std::vector<Message> sends;
  std::vector<Message> receives;
  std::vector<std::pair<Memory, Memory>> copies;  // from, to

  void copy() const;
};

class Communicator {
 public:
  using Body = std::function<void(Communicator&)>;

  // `gloo` has the same ranks.
  Communicator(Place place, StorePtr store, BackendPtr gloo, Milliseconds timeout);

  const Place& place() const { return place_; }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }

  // The place of an operation among all of this communicator, in the order in which the host launches them. From 1 on.
  uint64_t take_ticket();
  // On a stream's thread, once per ticket: waits until the operations before it are done, then does `body`. What fails
  // is reported by driver.h's `fail`; later operations are then left out.
  void run(uint64_t ticket, const std::string& what, const Body& body);

  // To be called by bodies. Messages between two ranks match by their order. What the other side does must be of the
  // same kind, detail and bytes, or this throws.
  void exchange(Kind kind, int64_t detail, const Moves& moves);

  // No further operations. With `finish_first` those that were launched are done before, else they are left out.
  void close(const std::string& reason, bool finish_first);

  uint64_t num_launched() const { return next_ - 1; }

 private:
  std::string explain(uint64_t ticket, const std::string& what, const std::string& reason);

  const Place place_;
  const StorePtr store_;
  std::atomic<Milliseconds> timeout_;
  std::atomic<uint64_t> next_{1};

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t done_ = 0;
  bool is_running_ = false;
  std::string closed_;  // why; empty: it is not
  std::string failed_;
  BackendPtr gloo_;
};

}  // namespace async_device
