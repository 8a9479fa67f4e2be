// The order in which programs start their communications, the same on every rank.
//
// On CPU each group of ranks has an IssueOrder: programs that share a group start their communications there in the
// order in which the programs were started. Programs that share no group do not wait for each other, so a host that
// waits inside one program does not keep another thread from starting a program on other groups.
//
// On devices with streams the host never waits, and each device has one IssueOrder. There the device keeps the order
// too, for all streams of callers: if the transfers of two communicators run in one order on a rank and in another
// order on its peer, the two can deadlock.
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

// Programs in the order in which they were started. A program starts its communications only after all earlier programs
// have started all of theirs. While a function of the IssueOrder runs, no other program in it starts communications.
// Thread-safe.
class IssueOrder {
 public:
  explicit IssueOrder(c10::Device device) : device_(device) {}

  // Makes the programs before `run` start all their communications. Then calls `advance`, which starts some
  // communications of `run` on the current stream or on side streams. The remaining communications of `run` start
  // before those of later programs.
  void issue(const std::shared_ptr<Execution>& run, const std::function<void()>& advance);

  // Like `issue`, for the IssueOrders of all these groups.
  static void issue_on(c10::ArrayRef<RankGroupPtr> groups, const std::shared_ptr<Execution>& run,
                       const std::function<void()>& advance);

  // Like `issue`, for transfers that start at once and belong to no program.
  void issue(const std::function<void()>& start);

  // Like `issue`, for a program that `submit` gives to side streams of a device, so that the caller's stream continues.
  // A caller may still wait for the program as long as `output` exists; once it does not, the program's memory is
  // released (Execution::abandon).
  void issue_asynchronous(const std::shared_ptr<Execution>& run, const at::Tensor& output,
                          const std::function<void()>& submit);

  // Makes every program start all its communications.
  void drain();

 private:
  // A program on side streams, and its output. Neither is kept alive.
  struct AsynchronousRun {
    std::weak_ptr<Execution> run;
    c10::weak_intrusive_ptr<c10::TensorImpl> output;
  };

  // Makes `stream` wait for the last program that `issue` ran, if that program's caller used a stream other than the
  // current one.
  void wait_for_last_run(c10::Stream stream);
  // Makes `stream` wait for all programs of issue_asynchronous so far.
  void wait_for_asynchronous_runs(c10::Stream stream);
  // Notes that `current` is the caller's stream of the last program of `issue`.
  void record_last_stream(c10::Stream current);
  // Adds a program of issue_asynchronous, and abandons those that nobody can wait for any more.
  void track_asynchronous_run(const std::shared_ptr<Execution>& run, const at::Tensor& output);

  const c10::Device device_;
  std::recursive_mutex mutex_;
  std::deque<std::weak_ptr<Execution>> pending_;     // programs with communications left to start
  std::vector<AsynchronousRun> asynchronous_runs_;   // in the order in which they were started
  int64_t num_asynchronous_runs_ = 0;                // programs of issue_asynchronous so far
  std::map<c10::StreamId, int64_t> num_waited_for_;  // by stream: the number of asynchronous runs it has waited for
  std::optional<c10::Stream> last_stream_;           // the caller's stream of the last program of `issue`
  std::optional<StreamEvent> end_of_last_run_;       // recorded once there are several streams, and not in captures
  bool has_several_streams_ = false;                 // callers have used different streams
};

// Returns the IssueOrder of a device with streams, and the IssueOrder of a group on CPU.
IssueOrder& issue_order_of(const at::Device& device);
IssueOrder& issue_order_of(const RankGroup& group);

}  // namespace shardwright
