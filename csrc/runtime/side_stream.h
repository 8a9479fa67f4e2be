// The stream of a device that transfers run on beside compute: one per device, of high priority.
//
// A transfer begins behind what the current stream was given before it, and whoever waits for it makes its own current
// stream wait. The host never does. On CPU there are no streams: process groups have threads of their own.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <optional>

namespace shardwright {

// Makes the side stream current, behind what the current one was given, until it is destroyed. `device`: not the CPU.
class SideStreamGuard {
 public:
  explicit SideStreamGuard(c10::Device device);

  // What the side stream has been given by now.
  c10::Event record(bool with_time = false) const;

 private:
  c10::Stream side_;
  std::optional<c10::StreamGuard> guard_;
};

// The current stream waits for an event of its device.
void wait_for(const c10::Event& event, c10::Device device);

// Marks the current stream's place.
c10::Event record_current(c10::Device device, bool with_time);

}  // namespace shardwright
