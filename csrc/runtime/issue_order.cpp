#include "runtime/issue_order.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "runtime/execution.h"
#include "runtime/side_stream.h"

namespace shardwright {

void IssueOrder::issue(const std::shared_ptr<Execution>& run, const std::function<void()>& start) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  issue(start);
  if (!run->all_transfers_started()) pending_.push_back(run);
}

void IssueOrder::issue_on(c10::ArrayRef<RankGroupPtr> groups, const std::shared_ptr<Execution>& run,
                          const std::function<void()>& start) {
  c10::SmallVector<IssueOrder*, 4> orders;
  for (const RankGroupPtr& group : groups) orders.push_back(&issue_order_of(*group));
  std::sort(orders.begin(), orders.end());  // locks are acquired in one order, so that threads cannot deadlock
  orders.erase(std::unique(orders.begin(), orders.end()), orders.end());
  c10::SmallVector<std::unique_lock<std::recursive_mutex>, 4> locks;
  for (IssueOrder* order : orders) locks.emplace_back(order->mutex_);
  for (IssueOrder* order : orders) order->drain();
  start();
  if (run->all_transfers_started()) return;
  for (IssueOrder* order : orders) order->pending_.push_back(run);
}

void IssueOrder::issue(const std::function<void()>& start) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  drain();
  if (device_.is_cpu()) return start();
  const c10::Stream current = current_stream(device_);
  wait_for_last_run(current);
  wait_for_asynchronous_runs(current);
  start();
  record_last_stream(current);
}

void IssueOrder::issue_asynchronous(const std::shared_ptr<Execution>& run, const at::Tensor& output,
                                    const std::function<void()>& submit) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  drain();
  // Only the side stream waits, so that the caller's stream continues. In a capture the current stream waits instead,
  // because a side stream that stays idle must not become part of the capture.
  const bool captures = is_capturing(device_);
  wait_for_last_run(captures ? current_stream(device_) : side_stream(device_, SideStream::kTransfers));
  submit();
  if (!run->all_transfers_started()) pending_.push_back(run);
  track_asynchronous_run(run, output);
}

void IssueOrder::drain() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  while (!pending_.empty()) {
    const std::shared_ptr<Execution> run = pending_.front().lock();
    pending_.pop_front();
    if (run) run->start_all_transfers();
  }
}

// If only one of the two streams is in a capture, neither waits: a replay runs after all work before its launch.
void IssueOrder::wait_for_last_run(c10::Stream stream) {
  const c10::Stream current = current_stream(device_);
  if (!last_stream_ || *last_stream_ == current) return;
  has_several_streams_ = true;
  const bool captures = is_capturing(current);
  if (is_capturing(*last_stream_) != captures) return;
  if (end_of_last_run_ && !captures) return end_of_last_run_->block(stream);
  StreamEvent(*last_stream_).block(stream);
}

// All asynchronous runs end on one side stream. Each stream must wait for it, even if another stream has done so
// already.
void IssueOrder::wait_for_asynchronous_runs(c10::Stream stream) {
  int64_t& waited_for = num_waited_for_[stream.id()];
  if (waited_for == num_asynchronous_runs_) return;
  const c10::Stream completion = side_stream(device_, SideStream::kCompletion);
  const bool captures = is_capturing(stream);
  if (is_capturing(completion) != captures) return;
  StreamEvent(completion).block(stream);
  if (!captures) waited_for = num_asynchronous_runs_;
}

void IssueOrder::record_last_stream(c10::Stream current) {
  last_stream_ = current;
  end_of_last_run_.reset();
  if (has_several_streams_ && !is_capturing(current)) end_of_last_run_.emplace(current);
}

void IssueOrder::track_asynchronous_run(const std::shared_ptr<Execution>& run, const at::Tensor& output) {
  ++num_asynchronous_runs_;
  std::erase_if(asynchronous_runs_, [](const AsynchronousRun& entry) {
    const std::shared_ptr<Execution> known = entry.run.lock();
    if (!known || known->is_waited_for()) return true;
    if (entry.output.use_count() > 0) return false;
    known->abandon();  // c10d keeps a Work forever if nobody waits for it
    return true;
  });
  asynchronous_runs_.push_back({run, c10::weak_intrusive_ptr<c10::TensorImpl>(output.getIntrusivePtr())});
}

IssueOrder& issue_order_of(const at::Device& device) {
  static std::mutex mutex;
  using Key = std::pair<c10::DeviceType, c10::DeviceIndex>;
  static auto* orders = new std::map<Key, std::unique_ptr<IssueOrder>>;  // outlives threads
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<IssueOrder>& order = (*orders)[{device.type(), device.index()}];
  if (!order) order = std::make_unique<IssueOrder>(device);
  return *order;
}

// A new group at the address of a destroyed group gets the IssueOrder of that group, in which no run is pending.
IssueOrder& issue_order_of(const RankGroup& group) {
  static std::mutex mutex;
  static auto* orders = new std::unordered_map<const RankGroup*, std::unique_ptr<IssueOrder>>;  // outlives threads
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<IssueOrder>& order = (*orders)[&group];
  if (!order) order = std::make_unique<IssueOrder>(c10::Device(c10::kCPU));
  return *order;
}

}  // namespace shardwright
