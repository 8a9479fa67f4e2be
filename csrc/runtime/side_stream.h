// The side streams of a device, which programs use next to the caller's stream: one for transfers, one for what
// asynchronous programs have left to do after their calls have returned.
//
// Work given to a side stream begins after what the current stream was given before, or after an event. Whoever needs
// its result makes its own current stream wait; the host never waits. On CPU there are no streams: process groups have
// threads of their own.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <optional>

namespace shardwright {

enum class SideStream : uint8_t { kTransfers, kRest };

// One of each per device, of high priority. `device`: not the CPU.
c10::Stream side_stream(c10::Device device, SideStream which);

// Makes a side stream current until the guard is destroyed. What is given to it then comes after everything that the
// current stream was given, or after an event.
class SideStreamGuard {
 public:
  SideStreamGuard(c10::Device device, SideStream which);
  SideStreamGuard(c10::Device device, SideStream which, const c10::Event& behind);

  // An event after what the side stream has been given so far.
  c10::Event record(bool with_time = false) const;

 private:
  c10::Stream side_;
  std::optional<c10::StreamGuard> guard_;
};

c10::Stream current_stream(c10::Device device);

// The current stream waits for an event of its device.
void wait_for(const c10::Event& event, c10::Device device);

// An event at the current stream's place.
c10::Event record_current(c10::Device device, bool with_time);

// Whether a graph is captured on the current stream of a device. Never on CPU.
bool is_capturing(c10::Device device);

// How to find that out for one kind of device, where c10 cannot report it (before torch 2.15).
using CaptureQuery = bool (*)(c10::Stream stream);
bool register_capture_query(c10::DeviceType device, CaptureQuery query);

}  // namespace shardwright
