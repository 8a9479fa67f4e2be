// The interface of transports, which carry out the transfers within a group of ranks.
//
// Each transport has its own folder: c10d/ passes transfers to a process group, peers/ copies between memory that ranks
// share with each other. Planners know a transport's capabilities and thresholds from its Lowering (cost/lowering.h).
// Other code depends only on this header.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "layout/placement.h"
#include "support/error.h"

namespace shardwright {

// PyTorch's handle of a transfer that was started. `wait` throws if the transfer failed.
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Data that is sent to another rank or received from it.
struct Message {
  int64_t peer = -1;  // rank in the group
  at::Tensor data;    // contiguous
};

// Starts transfers within one group of ranks.
//
// All ranks of the group call the methods in the same order. A method returns handles to wait for, or null if the
// caller need not wait. Tensors must be contiguous, and must stay alive until the wait.
//
// On CPU the host carries out transfers, and a wait blocks it. On devices with streams a wait makes the current stream
// wait, not the host. A transfer runs after all work that was submitted to the current stream before the call. Work
// that is submitted to the current stream after the wait (after the call, if there is no handle) runs after the
// transfer. Replays of a captured graph keep this order.
//
// A method throws if the transfer cannot be started; the transport can still start other transfers. If a transfer fails
// or times out later, its wait throws on CPU; for devices, see the transport's header.
class Transport {
 public:
  virtual ~Transport() = default;

  // Does the setup that needs all ranks. All ranks of the group must call it before the first transfer on a device.
  // Later calls are cheap. Does nothing on CPU. Throws c10::Error, with nothing done, in a graph capture and while a
  // group of NCCL calls is open (runtime/open_groups.h).
  virtual void connect(c10::Device device) = 0;

  // Writes the inputs of all ranks to `output`, in the order of ranks. All inputs have the same number of elements.
  virtual WorkPtr all_gather(at::Tensor& output, at::Tensor& input) = 0;
  // Reduces the inputs of all ranks. The result is divided into one equal part per rank; rank r receives part r.
  virtual WorkPtr reduce_scatter(at::Tensor& output, at::Tensor& input, ReduceOp op) = 0;
  // Reduces `data` over all ranks, in place.
  virtual WorkPtr all_reduce(at::Tensor& data, ReduceOp op) = 0;
  // Sends part r of `input` to rank r, and receives part r of `output` from it. The counts are the elements of each
  // part, in the order of ranks; the parts for and from this rank are included.
  virtual WorkPtr all_to_all(at::Tensor& output, at::Tensor& input, std::vector<int64_t> output_counts,
                             std::vector<int64_t> input_counts) = 0;
  // Sends and receives messages, at least one. Messages between two ranks are matched by their order, and only with
  // messages of this method, so other uses of the group do not interfere. Ranks without messages need not call it. May
  // remove messages from both lists.
  virtual std::vector<WorkPtr> send_receive(std::vector<Message>& sends, std::vector<Message>& receives) = 0;

  // The next three functions are for products that wait for flags: an all-gather in two halves, `offer` and `fetch`
  // (Offer and Fetch in program/instructions.h). Few transports support it.
  //
  // Returns the reason why this transport does not support `offer` and `fetch` on a device for parts of this many
  // bytes, or nullopt if it does. Call `offer` and `fetch` only if it does, and start no other transfer between the two
  // calls.
  virtual std::optional<std::string> why_no_offers(c10::Device /*device*/, int64_t /*part_bytes*/) const {
    return "the process group has no arenas; make them with shardwright.prepare(peer_arena_bytes=...)";
  }
  // Starts the first half: makes this rank's part readable by the other ranks.
  virtual void offer(const at::Tensor& /*input*/) {
    check_invariant(false, "the transport does not support Offer and Fetch");
  }
  // Starts the second half: copies the parts of the other ranks to `output`, and sets the flag of each chunk to 1 after
  // the chunk's data. `flags` are uint32 zeros, one for each of the equal chunks of `output`, and equally many for each
  // rank. This rank's own part must be in `output` already; its flags are set first. Uses no multiprocessor, because
  // the product that waits for the flags may occupy all of them.
  virtual void fetch(at::Tensor& /*output*/, const at::Tensor& /*flags*/) {
    check_invariant(false, "the transport does not support Offer and Fetch");
  }
  // Returns the timeout of transfers that the transport itself enforces; 0 if it enforces none.
  virtual std::chrono::milliseconds timeout() const { return {}; }
};

// Keeps a group alive and gives access to its transport. Converts to false if the group was destroyed.
class GroupLease {
 public:
  GroupLease(c10::intrusive_ptr<c10::intrusive_ptr_target> owner, Transport* transport)
      : owner_(std::move(owner)), transport_(transport) {}

  explicit operator bool() const { return owner_.defined(); }
  Transport* operator->() const { return transport_; }

 private:
  c10::intrusive_ptr<c10::intrusive_ptr_target> owner_;
  Transport* transport_;
};

// The group of ranks to which a program is bound. Does not keep the underlying group, such as a process group, alive.
class RankGroup {
 public:
  using WeakOwner = c10::weak_intrusive_ptr<c10::intrusive_ptr_target>;

  // `owner` is an object that lives as long as the underlying group. `rank` is this rank's index in the group.
  RankGroup(std::string name, int64_t rank, int64_t size, WeakOwner owner, std::unique_ptr<Transport> transport)
      : name_(std::move(name)), rank_(rank), size_(size), owner_(std::move(owner)) {
    replace_transport(std::move(transport));
  }

  const std::string& name() const { return name_; }
  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }

  // True if the underlying group was destroyed.
  bool is_gone() const { return owner_.expired(); }
  // Returns a lease, which converts to false if the group was destroyed.
  GroupLease lease() const { return {owner_.lock(), transport_}; }

  // Replaces the transport for later transfers. All ranks must do so, because different transports cannot communicate
  // with each other. The previous transport is kept for existing leases, and for transfers that the new transport
  // delegates to it.
  void replace_transport(std::unique_ptr<Transport> transport) {
    const std::lock_guard<std::mutex> lock(mutex_);
    transports_.push_back(std::move(transport));
    transport_ = transports_.back().get();
  }

  // Frees the transports of a destroyed group, and their arenas. They are not in use, because programs that are still
  // bound to the group get no leases.
  void drop_transports() {
    std::vector<std::unique_ptr<Transport>> dropped;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      transport_ = nullptr;
      dropped.swap(transports_);
    }
    while (!dropped.empty()) dropped.pop_back();  // last first: each one uses the one before it
  }

 private:
  const std::string name_;
  const int64_t rank_;
  const int64_t size_;
  const WeakOwner owner_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::atomic<Transport*> transport_{nullptr};  // the last of transports_
};

using RankGroupPtr = std::shared_ptr<RankGroup>;

}  // namespace shardwright
