// Makes programs start their transfers in the same order on every rank.
//
// For example, program A has the transfers a1 and, after a Wait, a2; B has b1. Both use one group, and every rank
// starts A before B. Whichever program a rank waits for first, it must start a1, a2, b1 in this order, because process
// groups match transfers by their order. So before B starts b1, A is run up to a2.
//
// On CPU each group of ranks has an IssueOrder. Programs that share no group do not wait for each other: while a host
// waits inside one program, another thread can start a program on other groups.
//
// On devices with streams the host never waits, and each device has one IssueOrder. It also makes the transfers run in
// this order on the device, even if callers use different streams. If two ranks ran the transfers of two communicators
// in different orders, they could deadlock.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime/side_stream.h"
#include "runtime/transport.h"

namespace shardwright {

class Execution;

// The programs whose transfers must start in order. A program starts its transfers only after all earlier programs have
// started all their transfers. While one thread is in a function of the IssueOrder, no other thread starts transfers in
// it. Thread-safe.
class IssueOrder {
 public:
  explicit IssueOrder(c10::Device device) : device_(device) {}

  // Makes the earlier programs start all their transfers. Then calls `start`, which starts some transfers of `run` on
  // the current stream or on side streams. The remaining transfers of `run` start before those of later programs.
  // Raises the error of an earlier program that fails meanwhile, without calling `start`; so do the other public
  // functions.
  void issue(const std::shared_ptr<Execution>& run, const std::function<void()>& start);

  // Like `issue`, in the IssueOrders of all these groups on CPU.
  static void issue_on(c10::ArrayRef<RankGroupPtr> groups, const std::shared_ptr<Execution>& run,
                       const std::function<void()>& start);

  // Like `issue`, for transfers that belong to no program. `start` must start all of them.
  void issue(const std::function<void()>& start);

  // Like `issue`, for a program that `submit` submits to side streams of a device, so that the caller's stream
  // continues. A caller may wait for the program only as long as `output` exists; once it is gone, a later call
  // releases the program's memory (Execution::abandon).
  void issue_asynchronous(const std::shared_ptr<Execution>& run, const at::Tensor& output,
                          const std::function<void()>& submit);

  // Makes every program start all its transfers.
  void drain();

 private:
  // A run on side streams, and its output. Neither is kept alive.
  struct AsynchronousRun {
    std::weak_ptr<Execution> run;
    c10::weak_intrusive_ptr<c10::TensorImpl> output;
  };

  // Makes `stream` wait for the last run of `issue`, unless that run's caller used the stream that is current now.
  void wait_for_last_run(c10::Stream stream);
  // Makes `stream` wait for all runs of issue_asynchronous so far.
  void wait_for_asynchronous_runs(c10::Stream stream);
  // Stores `current` as the caller's stream of the last run of `issue`.
  void record_last_stream(c10::Stream current);
  // Adds a run of issue_asynchronous, and abandons the runs that nobody can wait for any more.
  void track_asynchronous_run(const std::shared_ptr<Execution>& run, const at::Tensor& output);

  const c10::Device device_;
  std::recursive_mutex mutex_;
  std::deque<std::weak_ptr<Execution>> pending_;     // runs with transfers left to start
  std::vector<AsynchronousRun> asynchronous_runs_;   // in the order in which they were started
  int64_t num_asynchronous_runs_ = 0;                // runs of issue_asynchronous so far
  std::map<c10::StreamId, int64_t> num_waited_for_;  // by stream: number of asynchronous runs that it has waited for
  std::optional<c10::Stream> last_stream_;           // the caller's stream of the last run of `issue`
  // An event after the last run of `issue`. Recorded only if there are several streams, and not in captures.
  std::optional<StreamEvent> end_of_last_run_;
  bool has_several_streams_ = false;  // callers have used different streams
};

// Returns the IssueOrder of a device with streams; `device` must have an index.
IssueOrder& issue_order_of(const at::Device& device);
// Returns the IssueOrder of a group on CPU.
IssueOrder& issue_order_of(const RankGroup& group);

}  // namespace shardwright
