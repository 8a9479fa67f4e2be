// What the executor needs of a group of ranks, whatever carries it out.
//
// A transport is a folder of its own: c10d/ hands transfers to a process group, peers/ copies between memory that ranks
// see of each other. What a transport can do and from which sizes on it does it otherwise, planners know from its
// Lowering (cost/lowering.h); nothing else outside of its folder depends on it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "layout/placement.h"

namespace shardwright {

// A transfer under way, as PyTorch has it: `wait` raises what went wrong.
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Message {
  int64_t peer = -1;  // rank in the group
  at::Tensor data;    // contiguous
};

// Every method starts a transfer in which the ranks of one group take part, in the same order on all of them, and
// returns what is left to wait for; null: nothing. Tensors are contiguous, and alive until the transfer was waited for.
//
// On CPU the host carries transfers out, and waiting blocks it. On devices with streams the host waits for nothing: a
// transfer reads and writes memory after what the current stream was given before the call. After the wait, or after
// the call where nothing is left to wait for, whatever the current stream is given next comes after the transfer. The
// same holds while a graph is captured, for its replays.
//
// What cannot be started raises, with the transport in a state to start the next one. What fails or times out later is
// raised by the wait where the host carries it out, and on devices as the transport's folder says.
class Transport {
 public:
  virtual ~Transport() = default;

  // Before the first transfer on a device, by all ranks of the group: makes what needs all of them, and is cheap
  // afterwards. Does nothing on CPU and while a graph is captured.
  virtual void connect(c10::Device device) = 0;

  // The same number of elements from every rank, in the order of ranks.
  virtual WorkPtr all_gather(at::Tensor& output, at::Tensor& input) = 0;
  virtual WorkPtr reduce_scatter(at::Tensor& output, at::Tensor& input, ReduceOp op) = 0;
  virtual WorkPtr all_reduce(at::Tensor& data, ReduceOp op) = 0;
  // So many elements from and to each rank, the own one included.
  virtual WorkPtr all_to_all(at::Tensor& output, at::Tensor& input, std::vector<int64_t> output_counts,
                             std::vector<int64_t> input_counts) = 0;
  // A batch of messages between some ranks of the group, at least one; none to the own rank. Two ranks' messages match
  // by their order, and only those sent here: it does not matter when others use the group.
  virtual std::vector<WorkPtr> send_receive(std::vector<Message>& sends, std::vector<Message>& receives) = 0;
};

// A group that cannot be destroyed while this exists, with what carries its transfers.
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

// A group of ranks as programs are bound to it. Does not keep it alive.
class RankGroup {
 public:
  using WeakOwner = c10::weak_intrusive_ptr<c10::intrusive_ptr_target>;

  // `owner` lives as long as the group. `transport` is used under leases alone.
  RankGroup(std::string name, int64_t rank, int64_t size, WeakOwner owner, std::unique_ptr<Transport> transport)
      : name_(std::move(name)), rank_(rank), size_(size), owner_(std::move(owner)) {
    replace_transport(std::move(transport));
  }

  const std::string& name() const { return name_; }
  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }

  bool is_gone() const { return owner_.expired(); }
  // False where the group was destroyed.
  GroupLease lease() const { return {owner_.lock(), transport_}; }

  // For transfers that start from now on. Collective: two transports do not understand each other. The one before
  // stays, for transfers that this one does not take and for leases that are out.
  void replace_transport(std::unique_ptr<Transport> transport) {
    const std::lock_guard<std::mutex> lock(mutex_);
    transports_.push_back(std::move(transport));
    transport_ = transports_.back().get();
  }

 private:
  const std::string name_;
  const int64_t rank_;
  const int64_t size_;
  const WeakOwner owner_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::atomic<Transport*> transport_{nullptr};  // the last of them
};

using RankGroupPtr = std::shared_ptr<RankGroup>;

}  // namespace shardwright
