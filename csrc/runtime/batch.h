// Batches of many tensors (batch/batch.h), bound to a group of ranks. A batch moves elements from source tensors to
// destination tensors in rounds of messages. Its program is described in batch/compile_batch.h.
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

// A batch under way. Any thread may call any method, any number of times. Every wait raises the batch's failure. On CPU
// a wait blocks the host; on devices with streams it makes the current stream wait.
class BatchHandle {
 public:
  BatchHandle(std::shared_ptr<Execution> execution, at::Tensor token);

  void wait_for_sources() const;                     // until no source is read any more
  void wait_for_destination(int destination) const;  // until the destination is complete
  void wait_for_departure(int destination) const;    // also until its elements are sent to other ranks
  void wait() const;                                 // until everything is done
  // True once everything is done, without a wait.
  bool is_done() const;
  // Returns the indices of destinations in the order in which wait_for_departure ends.
  std::vector<int> departures() const;

 private:
  std::shared_ptr<Execution> execution_;
  at::Tensor token_;  // while it exists, the batch can be waited for
};

// One rank's part in a batch. Thread-safe.
class BoundBatch {
 public:
  // The batch's ranks are ranks of the group. `wire`: the type of device whose tensors the group supports; tensors on
  // other devices are sent through buckets in host memory. Throws UserError if a rank is not in the group.
  BoundBatch(std::shared_ptr<const BatchPlan> plan, Rank rank, RankGroupPtr group, c10::DeviceType wire);

  // `sources` and `destinations` are this rank's parts, with the shapes and dtypes of their layouts, on one device,
  // with any strides. On ranks outside a layout's mesh they have no elements. Throws c10::ValueError otherwise, with
  // nothing sent. Destinations must not share memory with each other or with sources; this is not checked. Throws
  // DistBackendError that names rank, round and group if a transfer fails.
  void run(std::vector<at::Tensor> sources, const std::vector<at::Tensor>& destinations) const;
  // Returns while transfers are under way. Sources are read until wait_for_sources().
  BatchHandle start(std::vector<at::Tensor> sources, const std::vector<at::Tensor>& destinations) const;

 private:
  // Returns a program for tensors with the strides of these, on the host or on a device. The last program is cached.
  ExecutablePtr executable(const std::vector<at::Tensor>& tensors) const;
  // Compiles a program for tensors with the strides of these. Throws c10::ValueError if one has a wrong shape.
  // `through_host`: the tensors are on a device, and messages are in host memory.
  ExecutablePtr compiled(const std::vector<at::Tensor>& tensors, bool through_host) const;

  std::shared_ptr<const BatchPlan> plan_;
  Rank rank_;
  RankGroupPtr group_;
  c10::DeviceType wire_;
  mutable std::mutex mutex_;
  mutable ExecutablePtr executable_;  // the last program
};

}  // namespace shardwright
