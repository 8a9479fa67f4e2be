// Transfers by c10d's process groups. Only this class depends on how the supported torch versions name the collectives.
//
// All calls use ProcessGroup's own methods, and so the dispatcher: active dispatch modes see them. On devices with
// streams, collectives run on the current stream. Messages run on the backend's own stream if it has one, after the
// work of the current stream, and in one batch if the backend supports batches.
//
// A transfer that fails on a device after its start is detected by the backend's own watchdog (docs/gpu.md).
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <mutex>
#include <set>
#include <vector>

#include "runtime/transport.h"

namespace shardwright {

class C10dTransport final : public Transport {
 public:
  // Does not keep the group alive.
  explicit C10dTransport(c10d::ProcessGroup* group) : group_(group) {}

  // NCCL's groups of torch 2.11 create their communicator in their first operation, which needs all ranks of the group,
  // even if it is a batch of messages. In a sparse exchange some ranks have no messages and would not take part, so the
  // others would hang. Therefore the first call on a device runs one tiny collective, on the current stream. In a
  // capture the first call throws c10::Error, unless the group is bound to the device.
  void connect(c10::Device device) override;

  WorkPtr all_gather(at::Tensor& output, at::Tensor& input) override;
  WorkPtr reduce_scatter(at::Tensor& output, at::Tensor& input, ReduceOp op) override;
  WorkPtr all_reduce(at::Tensor& data, ReduceOp op) override;
  WorkPtr all_to_all(at::Tensor& output, at::Tensor& input, std::vector<int64_t> output_counts,
                     std::vector<int64_t> input_counts) override;
  // Returns one Work, or one per message on backends that do not coalesce.
  std::vector<WorkPtr> send_receive(std::vector<Message>& sends, std::vector<Message>& receives) override;

 private:
  c10d::ProcessGroup* const group_;
  std::mutex mutex_;
  std::set<c10::DeviceIndex> connected_;  // devices on which `connect` has run its collective
};

}  // namespace shardwright
