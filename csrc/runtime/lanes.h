// The order in which programs start their communications: one lane per device, the same order on every rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/execution.h"

namespace shardwright {

// Programs in the order in which they were started. A program starts its communications only after all programs before
// it have started all of theirs.
class Lane {
 public:
  // Makes the programs before `execution` start all their communications, then calls `advance`, which starts some of
  // its own.
  void issue(const std::shared_ptr<Execution>& execution, const std::function<void(Execution&)>& advance);

  // Makes every program start all its communications.
  void drain();

  // If the device has streams: notes a program that continues beside its caller's stream, and whose result is `output`.
  void note_beside(const std::shared_ptr<Execution>& execution, const at::Tensor& output);

  // Makes the current stream wait for the last of these programs, and so for all of them, unless someone already did.
  void stand_behind_those_beside();

 private:
  struct Beside {
    std::weak_ptr<Execution> execution;
    c10::weak_intrusive_ptr<c10::TensorImpl> output;
  };

  std::recursive_mutex mutex_;
  std::deque<std::weak_ptr<Execution>> pending_;  // programs with communications left to start
  std::vector<Beside> beside_;
};

Lane& lane_of(const at::Device& device);

// Drains the lanes of all devices. Must be called before process groups are made.
void drain_lanes();

}  // namespace shardwright
