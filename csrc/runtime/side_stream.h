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
#include <memory>
#include <optional>

namespace shardwright {

enum class SideStream : uint8_t { kTransfers, kRest };

// There is one of each per device, of high priority. `device` must not be the CPU.
c10::Stream side_stream(c10::Device device, SideStream which);

// A point in the work of a stream, without a time. Events of the device are kept for later points, because the driver
// takes longer to make one than to record it. A point may be dropped as soon as all streams that come after it were
// told so.
class StreamEvent {
 public:
  // The point after everything that the stream has been given so far.
  explicit StreamEvent(c10::Stream stream);
  ~StreamEvent();
  StreamEvent(StreamEvent&&) noexcept = default;
  StreamEvent& operator=(StreamEvent&&) = delete;

  // Work that the stream gets from now on comes after the point.
  void block(c10::Stream stream) const;
  // Returns true once the device has passed the point.
  bool query() const { return event_->query(); }

 private:
  std::unique_ptr<c10::Event> event_;  // null after a move
};

// The number of events that were made for StreamEvents, in this process.
int64_t num_stream_events_made();

// Makes a side stream current until the guard is destroyed. Work given to it then comes after everything that was given
// to the stream that was current before, or after an event.
class SideStreamGuard {
 public:
  SideStreamGuard(c10::Device device, SideStream which);
  SideStreamGuard(c10::Device device, SideStream which, const StreamEvent& after);

  // Records an event after everything that the side stream has been given so far.
  StreamEvent record() const { return StreamEvent(side_); }

 private:
  c10::Stream side_;
  std::optional<c10::StreamGuard> guard_;
};

c10::Stream current_stream(c10::Device device);

// Makes the current stream of a device wait for an event of that device.
void wait_for(const StreamEvent& event, c10::Device device);

// Records an event on the current stream: one that nothing else uses, with a time if asked for.
c10::Event record_current(c10::Device device, bool with_time);

// Returns whether a graph is being captured on a stream, or on the current stream of a device. False on CPU. Without an
// index, the device stands for all devices of its type that are in use.
bool is_capturing(c10::Stream stream);
bool is_capturing(c10::Device device);

// Queries that for one type of device, if c10 cannot report it (before torch 2.15).
using CaptureQuery = bool (*)(c10::Stream stream);
bool register_capture_query(c10::DeviceType device, CaptureQuery query);

}  // namespace shardwright
