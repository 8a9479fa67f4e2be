// The only file that knows how the supported torch versions name c10d's collectives.
//
// All calls use ProcessGroup's own methods, and so the dispatcher: active dispatch modes see them. Each call starts a
// transfer and returns its Work. On devices with streams, collectives run on the current stream and return null:
// whatever that stream is given next comes after them. Messages may run on a stream of the backend's, after what the
// current stream holds, and must be waited for.
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
// Returns one Work, or one per message on backends that do not coalesce.
std::vector<WorkPtr> send_receive(const GroupPtr& group, std::vector<Message>& sends, std::vector<Message>& receives);

}  // namespace shardwright::comm
