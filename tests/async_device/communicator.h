// The shared state of a strict process group after its rendezvous: the order of its operations, and messages for data,
// which are Gloo's. Everything else in process_group.h builds on these.
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
  std::vector<int64_t> global_ranks;  // empty for the default group

  int64_t global(int group_rank) const;
  std::string text() const;
  std::string text(const std::vector<int>& group_ranks) const;  // "rank 3", "ranks 0 and 2"
};

// Blocks the host until all ranks of the group have called it with this `key`, once per key and store, and returns
// their values by rank. After `timeout`, throws c10::DistBackendError that names the missing ranks. Throws one as well
// if the store has the key from an earlier rendezvous. `purpose` completes "... needs all ranks of the group".
std::vector<std::string> meet(const StorePtr& store, const Place& place, const std::string& key,
                              const std::string& value, const std::string& purpose, Milliseconds timeout);

// Memory of the device, not owned.
struct Memory {
  char* data = nullptr;
  int64_t count = 0;
  at::ScalarType dtype = at::kByte;

  static Memory of(const at::Tensor& tensor);
  int64_t bytes() const;
  Memory part(int64_t first, int64_t num) const;
  at::Tensor as_cpu() const;  // shares the memory
  at::Tensor as_bytes() const;
};

struct Message {
  int peer = 0;
  Memory memory;
};

// The messages and copies of one rank in one operation.
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

  // Returns the number of an operation of this communicator, from 1 on, in the order in which the host launches them.
  uint64_t take_ticket();
  // Called on a stream's thread, once per ticket. Waits until the operations before it are done, then runs `body`. A
  // failure is reported by driver.h's `fail`, and later operations are skipped.
  void run(uint64_t ticket, const std::string& what, const Body& body);

  // Called by bodies. Messages between two ranks match by their order. Throws if the other side's operation differs in
  // kind, detail or bytes.
  void exchange(Kind kind, int64_t detail, const Moves& moves);

  // Ends all operations. With `finish_first`, launched operations finish first; otherwise they are skipped.
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
  std::string closed_;  // the reason; empty while the communicator is open
  std::string failed_;
  BackendPtr gloo_;
};

}  // namespace async_device
