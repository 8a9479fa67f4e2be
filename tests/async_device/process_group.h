// A process group for tests, "strict", with NCCL's rules on the device of driver.h.
//
// - All ranks of the group make its communicator together: when the group is made ("eager"), or in the first operation
//   ("lazy"), even if that is a batch of messages in which not all ranks take part. Splitting off a group needs all
//   ranks of its parent. When the group's timeout is over, an error names the missing ranks.
// - A collective with asyncOp = false goes onto the current stream, any other operation onto the group's own stream,
//   after all work that the current stream received before the call. Operations of a communicator match in the order in
//   which the host launches them, and each waits for the one before it, whatever streams they are on.
// - Messages are sent in batches (startCoalescing, endCoalescing), which start at their end. Tags are ignored: messages
//   between two ranks match by their order. While a batch is open, the group is unusable.
// - Nothing keeps tensors alive: not the work on the stream, not the Work (NCCL's groups do; see `keeps_tensors`).
// - While a graph is captured, operations are recorded for its replays, and making a communicator is an error.
// - Stricter than NCCL: operations that do not match fail with an error that names both operations; the next collective
//   also detects a batch of messages that is left open; messages outside batches raise.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "communicator.h"
#include "driver.h"

namespace async_device {

struct Rules {
  bool is_eager = false;          // the communicator is made together with the group
  bool has_real_work = false;     // synchronous collectives return a Work, as torch 2.15's NCCL does, not null
  bool is_high_priority = false;  // priority of the group's own stream
  bool waits_block_host = false;  // Work.wait blocks the host until it is done, as with TORCH_NCCL_BLOCKING_WAIT
  bool records_streams = false;   // messages record their stream with the allocator, as torch 2.11's NCCL does
  bool keeps_tensors = false;     // a Work keeps inputs, and outputs of collectives, until it is waited for
  // While a thread has a batch open on such a group, all its operations on any group start at the end of the batch, as
  // between ncclGroupStart and ncclGroupEnd. Torch's batches on "nccl" were such groups before 2.15.
  bool holds_thread = false;
  bool refuses_to_end = false;  // refuses while a captured graph with its operations exists, as "nccl2" of torch 2.15
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Makes the Gloo group that sends the data: store, rank, size, timeout. Must be set once, before any group is made.
using GlooMaker = std::function<BackendPtr(StorePtr, int, int, Milliseconds)>;
void set_gloo_maker(GlooMaker maker);

// Counts of this process: operations by name, "batch", "rendezvous", "split"; "communicators" counts existing ones.
std::map<std::string, int64_t> counters();
void reset_counters();

// Makes the n-th message from now on raise (1 is the next one), to test failures.
void refuse_message(int64_t number);

// Returns the number of batches that hold the calling thread.
int64_t open_groups_of_thread();

// The groups of the operations that this process has launched, in order, since the last call. A group is a number in
// the order in which the process made its groups.
std::vector<int> take_launched_groups();

class StrictGroup final : public c10d::Backend {
 public:
  StrictGroup(StorePtr store, Place place, Milliseconds timeout, Rules rules);
  ~StrictGroup() override;

  // Makes the communicator if it does not exist. Collective.
  void connect();
  // Makes a group of some of this group's ranks, ascending. Returns null if this rank is not among them. Collective
  // among all ranks of this group.
  c10::intrusive_ptr<StrictGroup> split_off(const StorePtr& store, const std::vector<int>& ranks,
                                            const std::string& name, Milliseconds timeout, Rules rules);

  const std::string getBackendName() const override { return "strict"; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(Milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override { return communicator_ ? communicator_->num_launched() : 0; }
  void eagerConnectSingleDevice(at::Device device) override;
  c10::intrusive_ptr<c10d::Backend> split(const StorePtr& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  void shutdown() override;  // after finishing launched operations
  void abort() override;

  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  // The default implementations of torch 2.15's all_gather_single and similar functions call these.
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  using Body = Communicator::Body;

  struct Batch {
    std::vector<Body> collectives;
    Moves messages;
    std::vector<c10::Stream> streams;
    Tensors kept;
    bool has_messages = false;
    bool is_async = false;
    std::string broken_by;
  };

  // `build` checks arguments, so that bad ones change nothing, and returns the operation's work on its rank.
  WorkPtr collective(Kind kind, bool is_async, const std::vector<Tensors>& used,
                     const std::function<Body(const char*)>& build);
  WorkPtr message(Tensors& tensors, int peer, bool is_send);
  WorkPtr launch(const std::vector<c10::Stream>& streams, const std::string& what, Body body, Tensors kept,
                 bool is_async, bool blocks_host = false);
  void check_usable(const char* what) const;
  void check_graphs();
  c10::Stream own_stream();
  c10::Stream stream_for(bool is_async);
  Body gathering(const Tensors& outputs, const at::Tensor& input) const;
  void attach(BackendPtr gloo);

  const StorePtr store_;
  const Place place_;
  const Rules rules_;
  const int number_;  // in the order in which the process made its groups
  Milliseconds timeout_;
  std::string unusable_;  // the reason; empty while the group is usable
  std::shared_ptr<Communicator> communicator_;
  std::optional<c10::Stream> own_streams_[kNumDevices];
  std::vector<std::weak_ptr<Graph>> graphs_;  // with operations of this group
  std::optional<Batch> batch_;
  std::mutex launching_;
  int64_t num_splits_ = 0;
};

}  // namespace async_device
