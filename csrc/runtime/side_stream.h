// The two side streams of a device, which programs use next to the caller's stream: one runs transfers, the other one
// completes asynchronous programs.
//
// Work on a side stream runs after the work that the current stream was given before, or after an event. A user of the
// result makes its own current stream wait; the host never waits. The CPU has no streams: process groups have their own
// threads.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace shardwright {

enum class SideStream : uint8_t {
  kTransfers,   // runs transfers
  kCompletion,  // runs the remaining instructions of asynchronous programs, so that the caller's stream can continue
};

// Returns a device's side stream of a kind, a stream of high priority. `device` must not be the CPU.
c10::Stream side_stream(c10::Device device, SideStream which);

// A point in the work of a stream, without a timestamp. Device events are reused, because the driver takes longer to
// create an event than to record it. A StreamEvent may be destroyed once `block` was called for every stream that must
// wait for it.
class StreamEvent {
 public:
  // Records the point after all work that the stream has been given so far.
  explicit StreamEvent(c10::Stream stream);
  ~StreamEvent();
  StreamEvent(StreamEvent&&) noexcept = default;
  StreamEvent& operator=(StreamEvent&&) = delete;

  // Makes work that `stream` is given from now on run after the point.
  void block(c10::Stream stream) const;
  // Returns true once the device has passed the point.
  bool query() const { return event_->query(); }

 private:
  std::unique_ptr<c10::Event> event_;  // null after a move
};

// Returns the number of device events that this process has created for StreamEvents.
int64_t num_stream_events_made();

// Makes a side stream current until the guard is destroyed. Work given to the side stream then runs after the event
// `after`, or by default after all work that the previous current stream was given.
class SideStreamGuard {
 public:
  SideStreamGuard(c10::Device device, SideStream which);
  SideStreamGuard(c10::Device device, SideStream which, const StreamEvent& after);

  // Records an event after all work that the side stream has been given so far.
  StreamEvent record() const { return StreamEvent(side_); }

 private:
  c10::Stream side_;
  std::optional<c10::StreamGuard> guard_;
};

// Returns the stream of a device to which this thread gives work.
c10::Stream current_stream(c10::Device device);

// Makes the current stream of a device wait for an event of that device.
void wait_for(const StreamEvent& event, c10::Device device);

// Records a new event on the current stream, with a timestamp if `with_time`. Nothing else uses the event.
c10::Event record_event(c10::Device device, bool with_time);

// True if a graph is being captured on a stream, or on the current stream of a device. False on CPU. A device without
// an index stands for all devices of its type that have a context.
bool is_capturing(c10::Stream stream);
bool is_capturing(c10::Device device);

// Implements is_capturing for one type of device, if c10 cannot report it (before torch 2.15).
using CaptureQuery = bool (*)(c10::Stream stream);
bool register_capture_query(c10::DeviceType device, CaptureQuery query);

}  // namespace shardwright
