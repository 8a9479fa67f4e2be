// The interface between the executor and the transports, which carry out the transfers within a group of ranks.
//
// Each transport has its own folder: c10d/ passes transfers to a process group, peers/ copies between memory that ranks
// share with each other. Planners read a transport's capabilities and thresholds from its Lowering (cost/lowering.h).
// No other code outside its folder depends on it.
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

// PyTorch's handle of a transfer under way. `wait` throws if the transfer failed.
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Data that is sent to one other rank, or received from it.
struct Message {
  int64_t peer = -1;  // rank in the group
  at::Tensor data;    // contiguous
};

// The transfers of one group of ranks.
//
// Each method starts a transfer in which all ranks of the group take part, in the same order on all of them. It returns
// handles to wait for, or null if nothing is left to wait for. Tensors must be contiguous, and must stay alive until
// the transfer was waited for.
//
// On CPU the host carries out transfers, and waiting blocks it. On devices with streams the host never waits: a
// transfer runs after the work that the current stream was given before the call. Work that the current stream is given
// after the wait (or after the call, if there is nothing to wait for) runs after the transfer. Replays of a captured
// graph keep this order.
//
// A transfer that cannot be started throws, and the transport can still start the next one. If a transfer fails or
// times out later, the wait throws where the host carries it out; for devices, see the transport's header.
class Transport {
 public:
  virtual ~Transport() = default;

  // All ranks of the group must call this before the first transfer on a device. It does the setup that needs all
  // ranks, and is cheap afterwards. Does nothing on CPU. Throws c10::Error, with nothing done, if setup is impossible
  // now: in a capture, or while a group of calls is open (runtime/open_groups.h).
  virtual void connect(c10::Device device) = 0;

  // Every rank contributes `input`, of the same number of elements. `output` has the inputs in the order of ranks.
  virtual WorkPtr all_gather(at::Tensor& output, at::Tensor& input) = 0;
  // Rank r receives part r, of equally many parts as ranks, of the reduction of all inputs.
  virtual WorkPtr reduce_scatter(at::Tensor& output, at::Tensor& input, ReduceOp op) = 0;
  // Reduces `data` over all ranks, in place.
  virtual WorkPtr all_reduce(at::Tensor& data, ReduceOp op) = 0;
  // Sends part r of `input` to rank r, and receives part r of `output` from it. The counts are the elements of each
  // part, in the order of ranks; the parts for and from this rank are included.
  virtual WorkPtr all_to_all(at::Tensor& output, at::Tensor& input, std::vector<int64_t> output_counts,
                             std::vector<int64_t> input_counts) = 0;
  // Starts a batch of at least one message between this rank and other ranks of the group. Messages between two ranks
  // are matched by their order, and only with messages sent by this method; other uses of the group do not interfere.
  virtual std::vector<WorkPtr> send_receive(std::vector<Message>& sends, std::vector<Message>& receives) = 0;

  // An all-gather in two halves (Offer and Fetch in program/instructions.h), which few transports support.
  // why_no_offers returns why this transport does not support parts of this many bytes. `offer` and `fetch` may be
  // called only if it returns nothing. Nothing else is started between the halves. `fetch` copies the other ranks'
  // parts and sets each chunk's flag after its data. It needs no multiprocessor to do so, because a product that waits
  // for the flags may hold all of them.
  virtual std::optional<std::string> why_no_offers(c10::Device, int64_t) const {
    return "its group has no arenas; make them with shardwright.prepare(peer_arena_bytes=...)";
  }
  // Lets the other ranks read this part.
  virtual void offer(const at::Tensor&) { check_invariant(false, "the transport does not support Offer and Fetch"); }
  // Copies the parts of the other ranks into the first tensor, and sets the flags of all chunks in the second one.
  virtual void fetch(at::Tensor&, const at::Tensor&) {
    check_invariant(false, "the transport does not support Offer and Fetch");
  }
  // Returns the time that a rank waits for the other ranks, if the transport itself enforces it; else 0.
  virtual std::chrono::milliseconds timeout() const { return {}; }
};

// Keeps a group alive and gives access to its transport. False if the group was destroyed.
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

// The group of ranks to which a program is bound. It does not keep the underlying group alive.
class RankGroup {
 public:
  using WeakOwner = c10::weak_intrusive_ptr<c10::intrusive_ptr_target>;

  // `owner` lives as long as the group. `transport` is used only through leases.
  RankGroup(std::string name, int64_t rank, int64_t size, WeakOwner owner, std::unique_ptr<Transport> transport)
      : name_(std::move(name)), rank_(rank), size_(size), owner_(std::move(owner)) {
    replace_transport(std::move(transport));
  }

  const std::string& name() const { return name_; }
  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }

  // True if the underlying group was destroyed.
  bool is_gone() const { return owner_.expired(); }
  // Returns a lease, which is false if the group was destroyed.
  GroupLease lease() const { return {owner_.lock(), transport_}; }

  // Replaces the transport for transfers that start from now on. Collective, because different transports cannot
  // communicate. The previous transport is kept, for existing leases and for transfers that the new one passes on to
  // it.
  void replace_transport(std::unique_ptr<Transport> transport) {
    const std::lock_guard<std::mutex> lock(mutex_);
    transports_.push_back(std::move(transport));
    transport_ = transports_.back().get();
  }

  // Frees the transports of a destroyed group, and their arenas. Nobody uses them, because programs that are still
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
