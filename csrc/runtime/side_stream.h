// The side streams of a device, which programs use next to the caller's stream: one for transfers, and one for what
// asynchronous programs have left to do after their calls have returned.
//
// Work on a side stream begins after the work that was given to the current stream before, or after an event. Whoever
// needs its result makes its own current stream wait; the host never waits. On CPU there are no streams; process groups
// have their own threads.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <optional>

namespace shardwright {

enum class SideStream : uint8_t { kTransfers, kRest };

// There is one of each per device, of high priority. `device` must not be the CPU.
c10::Stream side_stream(c10::Device device, SideStream which);

// Makes a side stream current until the guard is destroyed. Work given to it then comes after everything that was given
// to the stream that was current before, or after an event.
class SideStreamGuard {
 public:
  SideStreamGuard(c10::Device device, SideStream which);
  SideStreamGuard(c10::Device device, SideStream which, const c10::Event& after);

  // Records an event after everything that the side stream has been given so far.
  c10::Event record(bool with_time = false) const;

 private:
  c10::Stream side_;
  std::optional<c10::StreamGuard> guard_;
};

c10::Stream current_stream(c10::Device device);

// Makes the current stream wait for an event of its device.
void wait_for(const c10::Event& event, c10::Device device);

// Records an event on the current stream.
c10::Event record_current(c10::Device device, bool with_time);

// Returns whether a graph is being captured on the current stream of a device. False on CPU.
bool is_capturing(c10::Device device);

// How to query that for one type of device, if c10 cannot report it (before torch 2.15).
using CaptureQuery = bool (*)(c10::Stream stream);
bool register_capture_query(c10::DeviceType device, CaptureQuery query);

}  // namespace shardwright
