// Batches of many tensors (batch/batch.h), bound to a group of ranks.
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

// A batch under way. Every method may be called any number of times, by any thread. A failure is raised by every wait.
// On devices with streams, a wait makes the current stream wait.
class BatchHandle {
 public:
  BatchHandle(std::shared_ptr<Execution> execution, at::Tensor token);

  void wait_for_sources() const;                     // until no source is read any more
  void wait_for_destination(int destination) const;  // until it is complete
  void wait_for_departure(int destination) const;    // and until the same has left for other ranks
  void wait() const;                                 // until all are
  bool is_done() const;
  // The destinations, by number, in the order of their departures.
  std::vector<int> departures() const;

 private:
  std::shared_ptr<Execution> execution_;
  at::Tensor token_;  // as long as it exists, somebody may wait
};

// One rank's part in a batch. Thread-safe.
class BoundBatch {
 public:
  // The numbers of the batch's ranks are ranks in the group. `wire`: the kind of device whose tensors the group takes;
  // tensors on other devices travel through buckets in host memory. Throws UserError if a rank is not in the group.
  BoundBatch(std::shared_ptr<const BatchPlan> plan, Rank rank, RankGroupPtr group, c10::DeviceType wire);

  // `sources` and `destinations` are this rank's parts, with the shapes and dtypes of their layouts, on one device,
  // with any strides; on ranks outside a layout's mesh they have no elements. Destinations share memory neither with
  // each other nor with sources. Throws c10::ValueError otherwise, with nothing sent (shared memory is not checked),
  // and DistBackendError that names rank, round and group if a transfer fails.
  void run(std::vector<at::Tensor> sources, const std::vector<at::Tensor>& destinations) const;
  // Returns while transfers are under way. Sources are read until wait_for_sources().
  BatchHandle start(std::vector<at::Tensor> sources, const std::vector<at::Tensor>& destinations) const;

 private:
  // A program for tensors with these strides, on the host or on a device. The last one is kept.
  ExecutablePtr executable(const std::vector<at::Tensor>& tensors) const;
  ExecutablePtr compiled(const std::vector<at::Tensor>& tensors, bool through_host) const;

  std::shared_ptr<const BatchPlan> plan_;
  Rank rank_;
  RankGroupPtr group_;
  c10::DeviceType wire_;
  mutable std::mutex mutex_;
  mutable ExecutablePtr executable_;
};

}  // namespace shardwright
