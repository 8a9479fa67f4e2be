#include "runtime/c10d_adapter.h"

#include <torch/version.h>

#include "layout/error.h"

#define SHARDWRIGHT_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace shardwright::comm {
namespace {

// Messages of ours on a group carry this tag, so that they do not meet a user's own sends there, which start at 0.
constexpr int kMessageTag = 0x5357;

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kProduct:
      return c10d::ReduceOp::PRODUCT;
    default:
      throw InvariantError(concat("'", reduce_op_name(op), "' has no native collective"));
  }
}

// Backends with streams take a collective that is not asynchronous onto the current one. Others block until it is done.
template <typename Options>
Options options_for(const at::Tensor& data) {
  Options options;
  options.asyncOp = data.device().is_cpu();
  return options;
}

}  // namespace

WorkPtr all_gather(const GroupPtr& group, at::Tensor& output, at::Tensor& input) {
  const auto options = options_for<c10d::AllgatherOptions>(output);
#if SHARDWRIGHT_TORCH_AT_LEAST(2, 15)
  return group->all_gather_single(output, input, options);
#else
  return group->_allgather_base(output, input, options);
#endif
}

WorkPtr reduce_scatter(const GroupPtr& group, at::Tensor& output, at::Tensor& input, ReduceOp op) {
  auto options = options_for<c10d::ReduceScatterOptions>(output);
  options.reduceOp = to_c10d(op);
#if SHARDWRIGHT_TORCH_AT_LEAST(2, 15)
  return group->reduce_scatter_single(output, input, options);
#else
  return group->_reduce_scatter_base(output, input, options);
#endif
}

WorkPtr all_reduce(const GroupPtr& group, at::Tensor& data, ReduceOp op) {
  auto options = options_for<c10d::AllreduceOptions>(data);
  options.reduceOp = to_c10d(op);
  std::vector<at::Tensor> tensors{data};
  return group->allreduce(tensors, options);
}

WorkPtr all_to_all(const GroupPtr& group, at::Tensor& output, at::Tensor& input, std::vector<int64_t> output_counts,
                   std::vector<int64_t> input_counts) {
  const auto options = options_for<c10d::AllToAllOptions>(output);
#if SHARDWRIGHT_TORCH_AT_LEAST(2, 15)
  return group->all_to_all_single(output, input, output_counts, input_counts, options);
#else
  return group->alltoall_base(output, input, output_counts, input_counts, options);
#endif
}

std::vector<WorkPtr> send_receive(const GroupPtr& group, std::vector<Message>& sends, std::vector<Message>& receives) {
  const at::Tensor& any = sends.empty() ? receives.front().data : sends.front().data;
  const auto device = any.device().type();
  const bool coalesces = device == at::kCUDA;
  std::vector<WorkPtr> works;
  if (coalesces) group->startCoalescing(device);
  for (Message& message : receives) {
    std::vector<at::Tensor> tensors{message.data};
    works.push_back(group->recv(tensors, static_cast<int>(message.peer), kMessageTag));
  }
  for (Message& message : sends) {
    std::vector<at::Tensor> tensors{message.data};
    works.push_back(group->send(tensors, static_cast<int>(message.peer), kMessageTag));
  }
  if (coalesces) works = {group->endCoalescing(device)};
  return works;
}

}  // namespace shardwright::comm
