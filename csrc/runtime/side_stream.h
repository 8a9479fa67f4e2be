// The two side streams of a device, which programs use next to the caller's stream: one runs transfers, the other one
// completes asynchronous programs.
//
// Work on a side stream runs after an event, or after all work that was submitted to the current stream before. A user
// of the result makes its own current stream wait; the host never waits. The CPU has no streams.
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

// Returns a side stream of a device, the same one in every call. It has high priority. `device` must have an index, and
// must not be the CPU.
c10::Stream side_stream(c10::Device device, SideStream which);

// A device event, without a timestamp, that marks the end of the work that was submitted to a stream before. Device
// events are reused, because creating an event takes longer than recording it. A StreamEvent may be destroyed once
// `block` was called for every stream that must wait for it.
class StreamEvent {
 public:
  // Records an event after all work that was submitted to the stream so far.
  explicit StreamEvent(c10::Stream stream);
  ~StreamEvent();
  StreamEvent(StreamEvent&&) noexcept = default;
  StreamEvent& operator=(StreamEvent&&) = delete;

  // Makes all work that is submitted to `stream` from now on wait for the event.
  void block(c10::Stream stream) const;
  // Returns true once the device has passed the event.
  bool query() const;

 private:
  std::unique_ptr<c10::Event> event_;  // null after a move
};

// Returns the number of device events that this process has created for StreamEvents.
int64_t num_stream_events_made();

// Makes a side stream current until the guard is destroyed. Work submitted to the side stream from then on runs after
// the event `after`; by default, after all work that was submitted to the previous current stream.
class SideStreamGuard {
 public:
  SideStreamGuard(c10::Device device, SideStream which);
  SideStreamGuard(c10::Device device, SideStream which, const StreamEvent& after);

  // Records an event after all work that was submitted to the side stream so far.
  StreamEvent record() const { return StreamEvent(side_); }

 private:
  c10::Stream side_;
  std::optional<c10::StreamGuard> guard_;
};

// Returns the current stream of a device on this thread.
c10::Stream current_stream(c10::Device device);

// Makes the current stream of a device wait for an event.
void wait_for(const StreamEvent& event, c10::Device device);

// Returns a new event, recorded on the current stream, with a timestamp if `with_time`.
c10::Event record_event(c10::Device device, bool with_time);

// True if a graph is being captured on a stream. False on CPU, and before torch 2.15 on devices without a CaptureQuery.
bool is_capturing(c10::Stream stream);
// True if a graph is being captured on the current stream of a device. For a device without an index: on the current
// stream of any device of its type that has a context.
bool is_capturing(c10::Device device);

// Computes is_capturing for one type of device. Needed before torch 2.15; from then on c10 reports captures.
using CaptureQuery = bool (*)(c10::Stream stream);
// Registers the query of a type of device. Returns true.
bool register_capture_query(c10::DeviceType device, CaptureQuery query);

}  // namespace shardwright
