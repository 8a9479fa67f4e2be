// Runs batches of many tensors (batch/batch.h) in a group of ranks. A batch moves elements from source tensors to
// destination tensors in rounds of messages; batch/compile_batch.h describes its program.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <mutex>
#include <vector>

#include "batch/compile_batch.h"
#include "runtime/execution.h"
#include "runtime/transport.h"

namespace shardwright {

// A batch that was started. Any thread may call any method, any number of times. If the batch has failed, every wait
// raises its error. On CPU a wait blocks the host; on devices with streams it makes the current stream wait.
class BatchHandle {
 public:
  // `token`: the tensor with which start_all has started the batch.
  BatchHandle(std::shared_ptr<Execution> execution, at::Tensor token);

  // Waits until no source is read any more.
  void wait_for_sources() const;
  // Waits until this rank's part of a destination is complete. `destination` is its index in the batch. This and the
  // next function throw std::out_of_range for other numbers.
  void wait_for_destination(int destination) const;
  // Waits until this rank's part of a destination is complete, and this rank has sent all elements that it sends to the
  // destination's parts on other ranks.
  void wait_for_destination_and_sends(int destination) const;
  // Waits for the end of the batch.
  void wait() const;
  // Returns true once the batch has ended; does not wait.
  bool is_done() const;
  // Returns the indices of the destinations in the order in which wait_for_destination_and_sends returns for them.
  std::vector<int> completion_order() const;

 private:
  std::shared_ptr<Execution> execution_;
  at::Tensor token_;  // keeps the batch's memory until the handle is destroyed (start_all in executor.h)
};

// One rank's part in a batch. Thread-safe.
class BoundBatch {
 public:
  // The ranks of the plan's layouts are ranks in the group. `group_device`: the type of device whose tensors the group
  // transfers, CPU for Gloo; tensors on other devices are sent through buckets in host memory. Throws UserError if a
  // rank is not in the group.
  BoundBatch(std::shared_ptr<const BatchPlan> plan, Rank rank, RankGroupPtr group, c10::DeviceType group_device);

  // `sources` and `destinations` are this rank's parts, with the shapes and dtypes of their layouts, on one device,
  // with any strides. On ranks outside a layout's mesh they have no elements. Throws c10::ValueError otherwise, with
  // nothing sent. Destinations must not share memory with each other or with sources; this is not checked. Throws
  // DistBackendError that names rank, round and group if a transfer fails.
  void run(std::vector<at::Tensor> sources, const std::vector<at::Tensor>& destinations) const;
  // Like `run`, but returns once the first transfers are under way. Sources must not change before wait_for_sources()
  // returns.
  BatchHandle start(std::vector<at::Tensor> sources, const std::vector<at::Tensor>& destinations) const;

 private:
  // Returns the program for tensors with the strides and the device of `tensors`. The last program is cached.
  ExecutablePtr executable_for(const std::vector<at::Tensor>& tensors) const;
  // Compiles the program for tensors with the strides of `tensors`. `through_host`: true if the tensors are on a device
  // and messages are in host memory. Throws c10::ValueError if a tensor has a wrong shape or is not strided.
  ExecutablePtr compile_for(const std::vector<at::Tensor>& tensors, bool through_host) const;

  std::shared_ptr<const BatchPlan> plan_;
  Rank rank_;
  RankGroupPtr group_;
  c10::DeviceType group_device_;
  mutable std::mutex mutex_;
  mutable ExecutablePtr executable_;  // the last program
};

}  // namespace shardwright
