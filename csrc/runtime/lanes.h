// The order in which programs start their communications, the same on every rank.
//
// On CPU each group of ranks has a lane. Programs that share a group start their communications there in the order in
// which they were started. Programs that share no group do not wait for each other: a host that waits inside a program
// must not keep another thread, which uses other groups, from starting its own.
//
// On devices with streams the host never waits, and each device has one lane. There the order holds on the device too,
// whatever streams callers use: two communicators whose transfers run in one order on a rank and in another order on
// its peer can block each other.
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

// Programs in the order in which they were started. A program starts its communications only after all programs before
// it have started all of theirs. No other program of the lane starts any while a function here runs.
class Lane {
 public:
  explicit Lane(c10::Device device) : device_(device) {}

  // Makes the programs before `run` start all their communications, then calls `advance`, which starts some of its own,
  // on the current stream or on side streams.
  void issue(const std::shared_ptr<Execution>& run, const std::function<void()>& advance);

  // The same for the programs before `run` on the lanes of any of these groups.
  static void issue_on(c10::ArrayRef<RankGroupPtr> groups, const std::shared_ptr<Execution>& run,
                       const std::function<void()>& advance);

  // The same for transfers that are started at once, and belong to no program.
  void issue(const std::function<void()>& start);

  // If the device has streams: the same for a program that `submit` gives to side streams, which continue alongside the
  // caller's. Somebody may wait for it as long as `output` exists.
  void issue_asynchronous(const std::shared_ptr<Execution>& run, const at::Tensor& output,
                          const std::function<void()>& submit);

  // Makes every program start all its communications.
  void drain();

 private:
  struct AsynchronousRun {
    std::weak_ptr<Execution> run;
    c10::weak_intrusive_ptr<c10::TensorImpl> output;
  };

  // Makes a stream come after the transfers that the last program of `issue` gave to its caller's stream, if that is
  // another one than the current stream.
  void put_after_last(c10::Stream stream);
  void put_after_asynchronous_runs(c10::Stream stream);
  void note_last(c10::Stream current);
  void note_asynchronous(const std::shared_ptr<Execution>& run, const at::Tensor& output);

  const c10::Device device_;
  std::recursive_mutex mutex_;
  std::deque<std::weak_ptr<Execution>> pending_;  // programs with communications left to start
  std::vector<AsynchronousRun> asynchronous_;     // in the order in which they were started
  int64_t num_asynchronous_ = 0;
  std::map<c10::StreamId, int64_t> seen_;   // by stream, the number of asynchronous runs that it comes after
  std::optional<c10::Stream> last_;         // the caller's stream of the last program of `issue`
  std::optional<StreamEvent> end_of_last_;  // recorded once there are several streams, and not in captures
  bool has_several_streams_ = false;
};

// The lane of a device with streams, and that of a group on CPU.
Lane& lane_of(const at::Device& device);
Lane& lane_of(const RankGroup& group);

}  // namespace shardwright
