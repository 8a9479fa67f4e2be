#include "runtime/c10d/c10d_transport.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <utility>

#include "runtime/open_groups.h"
#include "runtime/side_stream.h"
#include "runtime/torch_version.h"
#include "support/error.h"

namespace shardwright {
namespace {

// The tag of our messages. It differs from the tags of a user's own messages on the group, which count from 0.
constexpr int kMessageTag = 0x5357;

// Returns c10d's reduction. Throws InvariantError for a reduction without native collective: no program reduces by it
// in a collective.
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
      throw InvariantError(concat("the reduction '", reduce_op_name(op), "' has no native collective"));
  }
}

// Returns the options of a collective. On CPU the collective is asynchronous, because it would block otherwise. On a
// device with streams it is not asynchronous, so that it runs on the current stream.
template <typename Options>
Options options_for(const at::Tensor& data) {
  Options options;
  options.asyncOp = data.device().is_cpu();
  return options;
}

// Returns `work` on CPU; else null, because the collective runs on the current stream and needs no wait. torch 2.15
// returns a Work there too, but its wait would record an event and query it.
WorkPtr pending_work(WorkPtr work, const at::Tensor& data) { return data.device().is_cpu() ? work : nullptr; }

// A batch of messages (c10d's coalescing), open from construction to end(). If a message cannot be started, the
// destructor ends the batch, because the group cannot be used while a batch is open. The messages before it have then
// started on the backend's own stream, and the current stream waits for them.
class MessageBatch {
 public:
  MessageBatch(c10d::ProcessGroup* group, c10::DeviceType device) : group_(group), device_(device) {
    group_->startCoalescing(device_);
  }
  ~MessageBatch() {
    if (is_ended_) return;
    try {
      if (const WorkPtr work = group_->endCoalescing(device_)) work->wait();
    } catch (const std::exception&) {
      // The first failure is being thrown already.
    }
  }
  MessageBatch(const MessageBatch&) = delete;
  MessageBatch& operator=(const MessageBatch&) = delete;

  // Ends the batch and returns the Work of all its messages.
  WorkPtr end() {
    is_ended_ = true;
    return group_->endCoalescing(device_);
  }

 private:
  c10d::ProcessGroup* group_;
  c10::DeviceType device_;
  bool is_ended_ = false;
};

// Runs a collective of one element, with which a group creates its communicator on a device. Bypasses the dispatcher,
// so that dispatch modes see only the collectives of redistributes.
void run_tiny_collective(c10d::ProcessGroup* group, c10::Device device) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard below_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  std::vector<at::Tensor> tensors{at::zeros({1}, at::TensorOptions(at::kFloat).device(device))};
  c10d::AllreduceOptions options;
  options.asyncOp = false;
  const WorkPtr work = group->getBackend(device.type())->allreduce(tensors, options);
  if (work) work->wait();
}

}  // namespace

void C10dTransport::connect(c10::Device device) {
  if (device.is_cpu() || group_->getSize() == 1) return;
  check_no_open_group(device);
  const std::lock_guard<std::mutex> lock(mutex_);  // held until the collective has started
  if (connected_.contains(device.index())) return;
  if (is_capturing(device)) {
    const bool was_connected_by_torch = group_->getBoundDeviceId() == device;  // when it created the group
    TORCH_CHECK(was_connected_by_torch, "group: process group '", group_->getGroupName(), "' of ", group_->getSize(),
                " ranks has no communicator on ", device, " yet. None can be made while a graph is captured. Call ",
                "shardwright.prepare(mesh), or run the same redistribute once, before the capture");
    return;
  }
  run_tiny_collective(group_, device);
  connected_.insert(device.index());
}

WorkPtr C10dTransport::all_gather(at::Tensor& output, at::Tensor& input) {
  const auto options = options_for<c10d::AllgatherOptions>(output);
#if SHARDWRIGHT_TORCH_AT_LEAST(2, 15)
  return pending_work(group_->all_gather_single(output, input, options), output);
#else
  return pending_work(group_->_allgather_base(output, input, options), output);
#endif
}

WorkPtr C10dTransport::reduce_scatter(at::Tensor& output, at::Tensor& input, ReduceOp op) {
  auto options = options_for<c10d::ReduceScatterOptions>(output);
  options.reduceOp = to_c10d(op);
#if SHARDWRIGHT_TORCH_AT_LEAST(2, 15)
  return pending_work(group_->reduce_scatter_single(output, input, options), output);
#else
  return pending_work(group_->_reduce_scatter_base(output, input, options), output);
#endif
}

WorkPtr C10dTransport::all_reduce(at::Tensor& data, ReduceOp op) {
  auto options = options_for<c10d::AllreduceOptions>(data);
  options.reduceOp = to_c10d(op);
  std::vector<at::Tensor> tensors{data};
  return pending_work(group_->allreduce(tensors, options), data);
}

WorkPtr C10dTransport::all_to_all(at::Tensor& output, at::Tensor& input, std::vector<int64_t> output_counts,
                                  std::vector<int64_t> input_counts) {
  const auto options = options_for<c10d::AllToAllOptions>(output);
#if SHARDWRIGHT_TORCH_AT_LEAST(2, 15)
  return pending_work(group_->all_to_all_single(output, input, output_counts, input_counts, options), output);
#else
  return pending_work(group_->alltoall_base(output, input, output_counts, input_counts, options), output);
#endif
}

std::vector<WorkPtr> C10dTransport::send_receive(std::vector<Message>& sends, std::vector<Message>& receives) {
  const at::Tensor& any = sends.empty() ? receives.front().data : sends.front().data;
  const c10::DeviceType device = any.device().type();
  std::optional<MessageBatch> batch;
  if (device != at::kCPU && group_->getBackend(device)->supportsCoalescing()) batch.emplace(group_, device);
  std::vector<WorkPtr> works;
  for (Message& message : receives) {
    std::vector<at::Tensor> tensors{message.data};
    works.push_back(group_->recv(tensors, static_cast<int>(message.peer), kMessageTag));
  }
  for (Message& message : sends) {
    std::vector<at::Tensor> tensors{message.data};
    works.push_back(group_->send(tensors, static_cast<int>(message.peer), kMessageTag));
  }
  if (batch) works = {batch->end()};
  return works;
}

}  // namespace shardwright
