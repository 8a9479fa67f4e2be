// The one place that knows how the supported torch versions name c10d's collectives.
//
// All go through ProcessGroup's own methods, and so through the dispatcher: whatever dispatch mode is active sees them.
// Each starts a transfer and returns its Work. On devices with streams, collectives run on the current one and return
// null: what that stream is given next comes after them. Messages may run on a stream of the backend's, behind the
// current one, and are to be waited for.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <vector>

#include "layout/placement.h"

namespace shardwright::comm {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using WeakGroupPtr = c10::weak_intrusive_ptr<c10d::ProcessGroup>;

struct Message {
  int64_t peer = -1;  // rank in the group
  at::Tensor data;    // contiguous
};

WorkPtr all_gather(const GroupPtr& group, at::Tensor& output, at::Tensor& input);
WorkPtr reduce_scatter(const GroupPtr& group, at::Tensor& output, at::Tensor& input, ReduceOp op);
WorkPtr all_reduce(const GroupPtr& group, at::Tensor& data, ReduceOp op);
WorkPtr all_to_all(const GroupPtr& group, at::Tensor& output, at::Tensor& input, std::vector<int64_t> output_counts,
                   std::vector<int64_t> input_counts);
// One Work, or one per message on backends that do not coalesce.
std::vector<WorkPtr> send_receive(const GroupPtr& group, std::vector<Message>& sends, std::vector<Message>& receives);

}  // namespace shardwright::comm
