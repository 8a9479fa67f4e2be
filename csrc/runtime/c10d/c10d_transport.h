// The transport that uses c10d's process groups. The names of collectives differ between the supported torch versions;
// only this class depends on them.
//
// All calls use ProcessGroup's own methods, and therefore the dispatcher, so active dispatch modes see them. On devices
// with streams, collectives run on the current stream. Messages run on the backend's own stream if it has one, after
// the work of the current stream, and as one batch if the backend supports batches.
//
// If a transfer on a device fails after its start, the backend's watchdog detects it (docs/gpu.md).
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <mutex>
#include <set>
#include <vector>

#include "runtime/transport.h"

namespace shardwright {

class C10dTransport final : public Transport {
 public:
  // Does not keep the process group alive.
  explicit C10dTransport(c10d::ProcessGroup* group) : group_(group) {}

  // The first call on a device runs one tiny collective on the current stream. NCCL's groups of torch 2.11 create their
  // communicator in their first operation, which needs all ranks of the group. If that were an exchange in which some
  // ranks have no messages, the other ranks would hang. In a capture the first call throws c10::Error, unless the group
  // is bound to the device.
  void connect(c10::Device device) override;

  WorkPtr all_gather(at::Tensor& output, at::Tensor& input) override;
  WorkPtr reduce_scatter(at::Tensor& output, at::Tensor& input, ReduceOp op) override;
  WorkPtr all_reduce(at::Tensor& data, ReduceOp op) override;
  WorkPtr all_to_all(at::Tensor& output, at::Tensor& input, std::vector<int64_t> output_counts,
                     std::vector<int64_t> input_counts) override;
  // Returns one Work for all messages, or one per message if the backend does not support batches.
  std::vector<WorkPtr> send_receive(std::vector<Message>& sends, std::vector<Message>& receives) override;

 private:
  c10d::ProcessGroup* const group_;
  std::mutex mutex_;
  std::set<c10::DeviceIndex> connected_;  // devices on which `connect` has run its collective
};

}  // namespace shardwright
