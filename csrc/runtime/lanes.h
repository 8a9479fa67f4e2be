// The order in which programs start their communications, the same on every rank.
//
// On CPU each group of ranks has a lane. Programs that share a group start their communications there in the order in
// which they were started. Programs that share no group do not wait for each other: a host that waits inside a program
// must not keep another thread, which uses other groups, from starting its own. On devices with streams the host never
// waits, and each device has one lane.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/run.h"
#include "runtime/transport.h"

namespace shardwright {

// Programs in the order in which they were started. A program starts its communications only after all programs before
// it have started all of theirs.
class Lane {
 public:
  // Makes the programs before `run` start all their communications, then calls `advance`, which starts some of its own.
  void issue(const std::shared_ptr<Run>& run, const std::function<void()>& advance);

  // The same for the programs before `run` on the lanes of any of these groups.
  static void issue_on(c10::ArrayRef<RankGroupPtr> groups, const std::shared_ptr<Run>& run,
                       const std::function<void()>& advance);

  // Makes every program start all its communications.
  void drain();

  // If the device has streams: notes a program that continues alongside its caller's stream, and for which somebody may
  // wait as long as `output` exists.
  void note_asynchronous(const std::shared_ptr<Run>& run, const at::Tensor& output);

  // Makes the current stream wait for the last of these programs, and so for all of them, unless somebody has waited
  // for it already. The host does not wait.
  void wait_for_asynchronous_runs();

 private:
  struct AsynchronousRun {
    std::weak_ptr<Run> run;
    c10::weak_intrusive_ptr<c10::TensorImpl> output;
  };

  std::recursive_mutex mutex_;
  std::deque<std::weak_ptr<Run>> pending_;     // programs with communications left to start
  std::vector<AsynchronousRun> asynchronous_;  // in the order in which they were started
};

// The lane of a device with streams, and that of a group on CPU.
Lane& lane_of(const at::Device& device);
Lane& lane_of(const RankGroup& group);

}  // namespace shardwright
