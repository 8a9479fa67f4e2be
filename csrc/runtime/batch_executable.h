// A rank's program in a batch, bound to a group of ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "batch/batch_program.h"
#include "runtime/batch_copies.h"
#include "runtime/transport.h"

namespace shardwright {

// Thread-safe.
class BatchExecutable {
 public:
  // The numbers of the batch's ranks are ranks in the group. `wire`: the kind of device whose tensors the group takes.
  BatchExecutable(std::shared_ptr<const BatchProgram> program, RankGroupPtr group, c10::DeviceType wire);

  const BatchProgram& program() const { return *program_; }
  RankGroup& group() const { return *group_; }
  bool goes_through_host(c10::Device device) const { return wire_ == c10::kCPU && !device.is_cpu(); }
  int64_t received_bytes() const { return received_bytes_; }

  // Throws c10::ValueError that names the first tensor whose number of elements per dim or element size is not that of
  // its layout on this rank, or that lies on another device than the first one.
  void check(const std::vector<at::Tensor>& sources, const std::vector<at::Tensor>& destinations) const;

  // Copies for tensors with these strides. The last ones are kept.
  std::shared_ptr<const PreparedBatch> prepared(const std::vector<at::Tensor>& sources,
                                                const std::vector<at::Tensor>& destinations) const;

 private:
  std::shared_ptr<const BatchProgram> program_;
  RankGroupPtr group_;
  c10::DeviceType wire_;
  std::vector<std::vector<int64_t>> source_shapes_;
  std::vector<std::vector<int64_t>> destination_shapes_;
  int64_t received_bytes_ = 0;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const PreparedBatch> prepared_;
};

}  // namespace shardwright
