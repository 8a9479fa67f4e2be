// The interface between the executor and whatever carries out the transfers of a group of ranks.
//
// Each transport has its own folder: c10d/ hands transfers to a process group, peers/ copies between memory that ranks
// share with each other. Planners know a transport's capabilities and thresholds from its Lowering (cost/lowering.h);
// nothing else outside of its folder depends on it.
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

// PyTorch's handle of a transfer under way. `wait` raises an error if the transfer failed.
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Message {
  int64_t peer = -1;  // rank in the group
  at::Tensor data;    // contiguous
};

// Every method starts a transfer in which the ranks of one group take part, in the same order on all of them, and
// returns what is left to wait for, or null. Tensors must be contiguous, and stay alive until the transfer was waited
// for.
//
// On CPU the host carries transfers out, and waiting blocks it. On devices with streams the host never waits: a
// transfer reads and writes memory after the work that was given to the current stream before the call. Work that the
// current stream gets after the wait, or after the call if there is nothing to wait for, comes after the transfer. The
// same holds for replays of a captured graph.
//
// A transfer that cannot be started raises, and leaves the transport able to start the next one. If it fails or times
// out later, the wait raises where the host carries it out; for devices, the transport's header says what happens.
class Transport {
 public:
  virtual ~Transport() = default;

  // All ranks of the group must call this before the first transfer on a device. It sets up what needs all of them, and
  // is cheap afterwards. Does nothing on CPU. Throws c10::Error, with nothing done, if that is not possible now: in a
  // capture, or while a group of calls is open (runtime/open_groups.h).
  virtual void connect(c10::Device device) = 0;

  // Every rank contributes the same number of elements; results are in the order of ranks.
  virtual WorkPtr all_gather(at::Tensor& output, at::Tensor& input) = 0;
  virtual WorkPtr reduce_scatter(at::Tensor& output, at::Tensor& input, ReduceOp op) = 0;
  virtual WorkPtr all_reduce(at::Tensor& data, ReduceOp op) = 0;
  // The counts are the elements from and to each rank, this one included.
  virtual WorkPtr all_to_all(at::Tensor& output, at::Tensor& input, std::vector<int64_t> output_counts,
                             std::vector<int64_t> input_counts) = 0;
  // A batch of at least one message between some ranks of the group, none of them to this rank. The messages of two
  // ranks are matched by their order, and only with messages sent here, so it does not matter when others use the
  // group.
  virtual std::vector<WorkPtr> send_receive(std::vector<Message>& sends, std::vector<Message>& receives) = 0;

  // An all-gather in two halves (Offer and Fetch in program/instructions.h), which few transports have. The first
  // function returns why this one does not, for parts of so many bytes; if it returns nothing, the others may be
  // called. Nothing else is started between the halves. `fetch` brings the other ranks' parts and sets all flags, a
  // chunk's after its data. What the current stream gets after `offer` is then enough for it: nothing that comes before
  // a flag needs a multiprocessor.
  virtual std::optional<std::string> why_no_offers(c10::Device, int64_t) const {
    return "transfers of its group do not go through arenas; make them by shardwright.prepare(peer_arena_bytes=...)";
  }
  virtual void offer(const at::Tensor&) { check_invariant(false, "a transport without offers"); }
  virtual void fetch(at::Tensor&, const at::Tensor&) { check_invariant(false, "a transport without offers"); }
  // The time that a rank waits for the others, if the transport itself decides that; else 0.
  virtual std::chrono::milliseconds timeout() const { return {}; }
};

// Keeps a group from being destroyed while it exists, and gives access to the group's transport.
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

  bool is_gone() const { return owner_.expired(); }
  // The lease is false if the group was destroyed.
  GroupLease lease() const { return {owner_.lock(), transport_}; }

  // Replaces the transport for transfers that start from now on. Collective, because different transports cannot
  // communicate. The previous one is kept, for transfers that the new one does not support and for existing leases.
  void replace_transport(std::unique_ptr<Transport> transport) {
    const std::lock_guard<std::mutex> lock(mutex_);
    transports_.push_back(std::move(transport));
    transport_ = transports_.back().get();
  }

  // Frees the transports, and with them arenas, of a group that is gone. Programs that are still bound to it get no
  // leases any more, so nobody uses them.
  void drop_transports() {
    std::vector<std::unique_ptr<Transport>> dropped;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      transport_ = nullptr;
      dropped.swap(transports_);
    }
    while (!dropped.empty()) dropped.pop_back();  // each before the one that it leaves transfers to
  }

 private:
  const std::string name_;
  const int64_t rank_;
  const int64_t size_;
  const WeakOwner owner_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::atomic<Transport*> transport_{nullptr};  // the last one
};

using RankGroupPtr = std::shared_ptr<RankGroup>;

}  // namespace shardwright
