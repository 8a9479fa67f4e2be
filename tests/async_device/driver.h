// The driver of a device for tests: memory is the host's, and everything else is as asynchronous as on a GPU.
//
// A stream is a thread that does its work in order, each piece after a random delay. So code that forgets to wait for
// another stream, or frees memory that another stream still uses, fails sooner or later, on any machine. Freed memory
// is overwritten with poison, in the order of its stream (allocator.h).
//
// As on a GPU,
// - work on a stream keeps no memory alive,
// - only events order streams,
// - a failure on a stream is raised by the next call that synchronises, and by every later one,
// - while a graph is captured, the work of its streams is kept for the graph's replays and not done now; querying and
//   synchronising are errors that end the capture, unless the thread has relaxed its rules.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace async_device {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
inline c10::Device device() { return {kDeviceType, 0}; }  // the only one

using Work = std::function<void()>;

// ---- streams. Number 0 is the default stream; it does not wait for the others, nor they for it.

inline c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
c10::Stream current_stream();                    // the current stream of this thread
c10::Stream set_current_stream(c10::Stream to);  // returns the previous one
c10::Stream stream_from_pool(bool is_high_priority);

// Adds work after all that the stream was given before. `work` must not own tensors of this device.
void enqueue(c10::Stream stream, Work work);

// The same for work that depends on when it is given to the stream: `at_launch` is called by the host at that moment,
// which is now, or at every replay of the graph that is captured now, and returns the work.
void enqueue_at_launch(c10::Stream stream, std::function<Work()> at_launch);

bool is_done(c10::Stream stream);
void synchronize(c10::Stream stream);
void synchronize_device();

// Raises the failure of a stream as c10::Error, as all synchronisation does. Does nothing if there is none.
void raise_failure();
// Fails like work that throws.
void fail(const std::string& reason);
void forget_failure();

// ---- events

struct Mark;  // one recording of an event

class Event {
 public:
  void record(c10::Stream stream);
  void block(c10::Stream stream) const;  // `stream` waits for the last recording, if there is one
  bool query() const;
  void synchronize() const;
  double milliseconds_until(const Event& later) const;

 private:
  std::shared_ptr<Mark> mark_;
};

// ---- delays

// Delays each piece of work, with this probability, by up to this many microseconds. The delays depend only on the seed
// and the stream. Applies to all streams at once.
void set_delays(uint64_t seed, double probability, int64_t max_microseconds);

// ---- graphs

class Graph;

// Captures the work of the current stream, and of streams that wait for it, until end_capture.
std::shared_ptr<Graph> begin_capture();
// Throws c10::Error if a rule was broken, or if a stream that joined the capture was not waited for.
void end_capture(const std::shared_ptr<Graph>& graph);
// Replays the graph on the current stream.
void replay(const Graph& graph);

bool is_capturing(c10::Stream stream);
const Graph* capturing_graph(c10::Stream stream);  // null if there is none
bool is_capturing_anywhere();
// If captures are under way and this thread's rules are not relaxed, invalidates them and throws.
void forbid_in_capture(const char* what);

// Relaxes the rules for this thread while it lives, as cudaStreamCaptureModeRelaxed does.
class RelaxedRules {
 public:
  RelaxedRules();
  ~RelaxedRules();
  RelaxedRules(const RelaxedRules&) = delete;
  RelaxedRules& operator=(const RelaxedRules&) = delete;
};

}  // namespace async_device
