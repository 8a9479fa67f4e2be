#include "runtime/batch_run.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "runtime/borrow.h"
#include "runtime/executor.h"
#include "runtime/lanes.h"
#include "runtime/progress.h"
#include "runtime/record.h"
#include "runtime/run.h"
#include "runtime/side_stream.h"
#include "runtime/staging.h"
#include "support/error.h"

namespace shardwright {
namespace {

using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

struct Action {
  enum class Kind : uint8_t { kStart, kKeep, kFinish };
  Kind kind = Kind::kKeep;
  int round = 0;  // index into BatchProgram::rounds()
};

std::vector<Action> actions_of(int rounds, int buckets) {
  std::vector<Action> actions;
  const int first = std::min(rounds, buckets);
  for (int r = 0; r < first; ++r) actions.push_back({Action::Kind::kStart, r});
  actions.push_back({Action::Kind::kKeep, 0});
  for (int r = 0; r < rounds; ++r) {
    actions.push_back({Action::Kind::kFinish, r});
    if (r + buckets < rounds) actions.push_back({Action::Kind::kStart, r + buckets});
  }
  return actions;
}

// Throws if the group was destroyed.
GroupLease lease_of(const BatchExecutable& executable) {
  GroupLease lease = executable.group().lease();
  TORCH_CHECK(lease, "shardwright: the process group '", executable.group().name(),
              "' of a batch was destroyed; allowed is one that exists");
  return lease;
}

}  // namespace

class BatchRun final : public Run {
 public:
  // Where copies run. On devices with streams, transfers have a side stream of their own.
  enum class Mode : uint8_t { kHost, kCurrentStream, kSideStream };

  BatchRun(std::shared_ptr<const BatchExecutable> executable, std::vector<at::Tensor> sources,
           std::vector<at::Tensor> destinations, c10::Device device, bool is_asynchronous)
      : executable_(std::move(executable)),
        program_(executable_->program()),
        prepared_(executable_->prepared(sources, destinations)),
        sources_(std::move(sources)),
        destinations_(std::move(destinations)),
        device_(device),
        goes_through_host_(executable_->goes_through_host(device)),
        mode_(device.is_cpu() || goes_through_host_ ? Mode::kHost
              : is_asynchronous                     ? Mode::kSideStream
                                                    : Mode::kCurrentStream),
        lease_(lease_of(*executable_)),
        actions_(actions_of(static_cast<int>(program_.rounds().size()), static_cast<int>(program_.plan().buckets()))),
        works_(program_.rounds().size()),
        transferred_(program_.rounds().size()),
        events_(actions_.size()) {
    for (size_t a = 0; a < actions_.size(); ++a) {
      if (actions_[a].kind == Action::Kind::kStart) last_start_ = static_cast<int>(a);
    }
  }

  ~BatchRun() override {
    if (mode_ == Mode::kHost) return;
    try {
      if (failure_) put_transfers_before_frees();
    } catch (const std::exception&) {
      // The group has failed, which has been reported already; a destructor must not throw.
    }
    abandon();
  }

  void run_next() override { run_until(std::min(next_ + 1, num_actions())); }
  void start_all() override { run_until(last_start_ + 1); }
  void start_first() { run_until(actions_of_first_starts()); }
  bool all_started() const override { return next_ > last_start_; }
  bool finished() const override { return next_ == num_actions(); }

  void finish_until(int action) {
    run_until(action);
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }
  void finish() { finish_until(num_actions()); }

  void release() override {
    // Tensors are freed without the lock, because that may need Python's.
    std::vector<at::Tensor> buckets;
    std::vector<at::Tensor> host_buckets;
    std::vector<at::Tensor> sources;
    std::vector<at::Tensor> destinations;
    std::optional<GroupLease> lease;
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    buckets.swap(buckets_);
    host_buckets.swap(host_buckets_);
    lease.swap(lease_);
    if (!failure_) {
      for (const at::Tensor& bucket : buckets) give_staging(bucket);
      for (const at::Tensor& bucket : host_buckets) give_staging(bucket);
    }
    if (mode_ == Mode::kSideStream) return;  // the device may still read and write them
    sources.swap(sources_);
    destinations.swap(destinations_);
  }

  // One past the last action that reads a source, or that writes a destination.
  int end_of_sources() const {
    int end = 0;
    for (size_t a = 0; a < actions_.size(); ++a) {
      const Action& action = actions_[a];
      const bool reads = action.kind == Action::Kind::kKeep ||
                         (action.kind == Action::Kind::kStart && !program_.rounds()[action.round].sends.empty());
      if (reads) end = static_cast<int>(a) + 1;
    }
    return end;
  }
  int end_of_destination(int destination) const {
    const int last = program_.last_round_of_destination(destination);
    for (size_t a = 0; a < actions_.size(); ++a) {
      const Action& action = actions_[a];
      const bool is_last =
          last < 0 ? action.kind == Action::Kind::kKeep : action.kind == Action::Kind::kFinish && action.round == last;
      if (is_last) return static_cast<int>(a) + 1;
    }
    return num_actions();
  }
  int end_of_round(int round) const {
    for (size_t a = 0; a < actions_.size(); ++a) {
      if (actions_[a].kind == Action::Kind::kFinish && actions_[a].round == round) return static_cast<int>(a) + 1;
    }
    return num_actions();
  }
  int num_actions() const { return static_cast<int>(actions_.size()); }

  // For a run on side streams: gives everything to the device, and returns.
  void submit() {
    started_in_capture_ = is_capturing(device_);
    const SideStreamGuard rest(device_, SideStream::kRest);
    run_until(num_actions());
    release();
  }
  // Makes the current stream, or on CPU the host, wait for the actions before this one.
  void wait_until(int action) {
    if (mode_ != Mode::kSideStream) {
      finish_until(action);
      // The progress thread may keep a run that is over for a while, which should not keep memory.
      if (finished()) release();
      return;
    }
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    TORCH_CHECK(is_capturing(device_) == started_in_capture_, "shardwright: rank ", program_.rank(),
                " waits for a batch on the other side of a graph capture; wait for it before a capture begins or ends");
    wait_for(*events_[action - 1], device_);
    if (action < num_actions()) return;
    is_waited_for_ = true;
    const c10::Stream current = current_stream(device_);
    for (const std::vector<at::Tensor>* tensors : {&sources_, &destinations_}) {
      for (const at::Tensor& tensor : *tensors) record_use(tensor, current);
    }
    sources_.clear();
    destinations_.clear();
  }
  bool is_done() const {
    if (mode_ != Mode::kSideStream) return finished();
    return !events_.back() || events_.back()->query();
  }

  bool is_waited_for() const override { return is_waited_for_; }
  void abandon() noexcept override {
    if (mode_ != Mode::kSideStream) return;
    try {
      const std::lock_guard<std::recursive_mutex> lock(mutex_);
      for (std::vector<at::Tensor>* tensors : {&sources_, &destinations_}) {
        for (const at::Tensor& tensor : *tensors) record_use(tensor, side_stream(device_, SideStream::kRest));
        tensors->clear();
      }
    } catch (const std::exception&) {
      // The device has failed; there is nothing left to protect.
    }
  }

 private:
  int actions_of_first_starts() const {
    return static_cast<int>(std::min<int64_t>(program_.plan().buckets(), static_cast<int64_t>(works_.size())));
  }

  void run_until(int end) {
    const BelowAutograd guard;
    const c10::OptionalDeviceGuard on_device(device_.is_cpu() ? std::nullopt : std::optional(device_));
    while (next_ < end) {
      const std::lock_guard<std::recursive_mutex> lock(mutex_);
      if (next_ >= end) return;
      const Action& action = actions_[next_];
      try {
        act(action);
        if (mode_ == Mode::kSideStream) events_[next_].emplace(current_stream(device_));
      } catch (const c10::Error& error) {
        fail(action, error.what_without_backtrace());
      } catch (const std::exception& error) {
        fail(action, error.what());
      }
      ++next_;
    }
  }

  [[noreturn]] void fail(const Action& action, const std::string& reason) {
    const std::string where =
        action.kind == Action::Kind::kKeep
            ? std::string("what stays on the rank")
            : concat("round ", program_.rounds()[action.round].number, " of ", program_.plan().num_rounds());
    const RankGroup& group = executable_->group();
    const std::string text =
        concat("shardwright: rank ", group.rank(), " of a group of ", group.size(), " ('", group.name(),
               "') failed in ", where, " of a batch of ", program_.plan().batch().items.size(), " items\n", reason);
    failure_ = std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, text));
    next_ = num_actions();  // a failed run does not continue
    std::rethrow_exception(failure_);
  }

  void act(const Action& action) {
    Record record;
    if (Record::is_wanted()) record.show("shardwright::batch");
    switch (action.kind) {
      case Action::Kind::kStart:
        return start(action.round);
      case Action::Kind::kKeep:
        for (const PreparedCopy& copy : prepared_->keep) {
          run_copy(copy, sources_[copy.source], destinations_[copy.destination]);
        }
        return;
      case Action::Kind::kFinish:
        return finish(action.round);
    }
  }

  // A run that has failed may have transfers under way on the side stream. The memory of its buckets belongs to the
  // stream on which they were allocated, which uses it again at once after they are freed.
  void put_transfers_before_frees() {
    if (!home_) return;  // no bucket was allocated
    const SideStreamGuard side(device_, SideStream::kTransfers);
    for (std::vector<WorkPtr>& works : works_) wait_for_works(works);
    side.record().block(*home_);
  }

  at::Tensor bucket_of(int round) {
    if (buckets_.empty()) {
      if (mode_ != Mode::kHost) home_ = current_stream(device_);
      const auto count = static_cast<size_t>(actions_of_first_starts());
      const at::TensorOptions options = at::TensorOptions().dtype(at::kByte);
      for (size_t b = 0; b < count; ++b) {
        buckets_.push_back(take_staging(program_.plan().bucket_bytes(), options.device(device_)));
        if (goes_through_host_) host_buckets_.push_back(take_staging(program_.plan().bucket_bytes(), options));
      }
    }
    return buckets_[round % buckets_.size()];
  }
  at::Tensor wire_bucket_of(int round) {
    const at::Tensor bucket = bucket_of(round);
    return goes_through_host_ ? host_buckets_[round % host_buckets_.size()] : bucket;
  }

  std::vector<Message> messages_of(const std::vector<BatchMessage>& messages, const at::Tensor& bucket) const {
    std::vector<Message> made;
    for (const BatchMessage& message : messages) {
      made.push_back({number(message.peer), bucket.narrow(0, message.offset_bytes, message.size_bytes)});
    }
    return made;
  }

  void start(int r) {
    const BatchRound& round = program_.rounds()[r];
    at::Tensor bucket = bucket_of(r);
    for (const PreparedCopy& copy : prepared_->rounds[r].pack) {
      run_copy(copy, sources_[copy.source], view_as(bucket, copy.in_bucket));
    }
    at::Tensor wire = wire_bucket_of(r);
    if (goes_through_host_) wire.narrow(0, 0, round.sent_bytes).copy_(bucket.narrow(0, 0, round.sent_bytes));
    std::vector<Message> sends = messages_of(round.sends, wire);
    std::vector<Message> receives = messages_of(round.receives, wire);
    if (mode_ == Mode::kHost) {
      works_[r] = (*lease_)->send_receive(sends, receives);
      return;
    }
    const SideStreamGuard side(device_, SideStream::kTransfers);
    works_[r] = (*lease_)->send_receive(sends, receives);
    for (WorkPtr& work : works_[r]) {
      if (work) work->wait();
    }
    works_[r].clear();
    transferred_[r].emplace(side.record());
  }

  void finish(int r) {
    wait_for_works(works_[r]);
    if (mode_ != Mode::kHost) wait_for(*transferred_[r], device_);
    const BatchRound& round = program_.rounds()[r];
    at::Tensor bucket = bucket_of(r);
    if (goes_through_host_) {
      bucket.narrow(0, round.sent_bytes, round.received_bytes)
          .copy_(wire_bucket_of(r).narrow(0, round.sent_bytes, round.received_bytes));
    }
    for (const PreparedCopy& copy : prepared_->rounds[r].unpack) {
      run_copy(copy, view_as(bucket, copy.in_bucket), destinations_[copy.destination]);
    }
  }

  static void wait_for_works(std::vector<WorkPtr>& works) {
    for (WorkPtr& work : works) {
      if (work) work->wait();
    }
    works.clear();
  }

  std::shared_ptr<const BatchExecutable> executable_;
  const BatchProgram& program_;
  std::shared_ptr<const PreparedBatch> prepared_;
  std::vector<at::Tensor> sources_;
  std::vector<at::Tensor> destinations_;
  c10::Device device_;
  bool goes_through_host_ = false;
  Mode mode_;
  std::optional<GroupLease> lease_;  // until it is released
  std::vector<Action> actions_;
  std::vector<std::vector<WorkPtr>> works_;              // by round
  std::vector<std::optional<StreamEvent>> transferred_;  // by round, if there are streams
  std::vector<std::optional<StreamEvent>> events_;       // by action, if it runs on side streams
  std::optional<c10::Stream> home_;                      // the stream on which buckets were allocated
  std::vector<at::Tensor> buckets_;
  std::vector<at::Tensor> host_buckets_;
  int last_start_ = -1;
  std::atomic<int> next_{0};
  std::atomic<bool> is_waited_for_{false};
  bool started_in_capture_ = false;
  std::exception_ptr failure_;
  mutable std::recursive_mutex mutex_;  // held for one action at a time
};

namespace {

c10::Device device_of(const std::vector<at::Tensor>& sources, const std::vector<at::Tensor>& destinations) {
  if (!sources.empty()) return sources.front().device();
  return destinations.empty() ? c10::Device(c10::kCPU) : destinations.front().device();
}

std::shared_ptr<BatchRun> made_run(const std::shared_ptr<const BatchExecutable>& executable,
                                   std::vector<at::Tensor>&& sources, std::vector<at::Tensor>&& destinations,
                                   bool is_asynchronous) {
  executable->check(sources, destinations);
  const c10::Device device = device_of(sources, destinations);
  const bool through_host = executable->goes_through_host(device);
  if (through_host) ++counters().through_host;
  lease_of(*executable)->connect(through_host ? c10::Device(c10::kCPU) : device);
  ++counters().runs;
  counters().received_bytes += executable->received_bytes();
  return std::make_shared<BatchRun>(executable, std::move(sources), std::move(destinations), device, is_asynchronous);
}

void run_here(const std::shared_ptr<BatchRun>& run, const RankGroup& group, c10::Device device, bool through_host) {
  Lane& lane = device.is_cpu() || through_host ? lane_of(group) : lane_of(device);
  lane.issue(run, [&] { run->start_all(); });
  run->finish();
  run->release();
}

}  // namespace

BatchHandle::BatchHandle(std::shared_ptr<BatchRun> run) : run_(std::move(run)), token_(at::empty({0})) {}

void BatchHandle::wait_for_sources() { run_->wait_until(run_->end_of_sources()); }
void BatchHandle::wait_for_destination(int destination) { run_->wait_until(run_->end_of_destination(destination)); }
void BatchHandle::wait_for_round(int round) { run_->wait_until(run_->end_of_round(round)); }
void BatchHandle::wait() { run_->wait_until(run_->num_actions()); }
bool BatchHandle::is_done() const { return run_->is_done(); }

void run_batch(const std::shared_ptr<const BatchExecutable>& executable, std::vector<at::Tensor> sources,
               std::vector<at::Tensor> destinations) {
  const c10::Device device = device_of(sources, destinations);
  const auto run = made_run(executable, std::move(sources), std::move(destinations), /*is_asynchronous=*/false);
  run_here(run, executable->group(), device, executable->goes_through_host(device));
}

BatchHandle start_batch(const std::shared_ptr<const BatchExecutable>& executable, std::vector<at::Tensor> sources,
                        std::vector<at::Tensor> destinations) {
  const c10::Device device = device_of(sources, destinations);
  const bool through_host = executable->goes_through_host(device);
  const auto run = made_run(executable, std::move(sources), std::move(destinations), /*is_asynchronous=*/true);
  BatchHandle handle(run);
  if (through_host) {
    run_here(run, executable->group(), device, through_host);
  } else if (device.is_cpu()) {
    // Dispatch modes of this thread should see all communications.
    const bool is_watched = c10::impl::TorchDispatchModeTLS::any_modes_set();
    lane_of(executable->group()).issue(run, [&] { is_watched ? run->start_all() : run->start_first(); });
    finish_on_progress_thread(run);
  } else {
    lane_of(device).issue_asynchronous(run, handle.token(), [&] { run->submit(); });
  }
  return handle;
}

}  // namespace shardwright
