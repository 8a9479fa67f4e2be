// The driver of a device for tests: memory is the host's, and everything else is as asynchronous as on a GPU.
//
// A stream is a thread that does what it is given, in order, each piece after a random delay. So whatever forgets to
// wait for another stream, or lets go of memory that another stream still uses, gets it wrong sooner or later, and on
// any machine. Memory that is freed is overwritten with poison, in the order of its stream (allocator.h).
//
// As on a GPU,
// - nothing that a stream was given keeps memory alive,
// - streams know nothing of each other but by events,
// - what fails on a stream is raised by the next call that synchronises, and by every later one,
// - while a graph is captured, what its streams are given is kept for the graph's replays and not done now; querying
//   and synchronising are errors that end the capture, unless the thread has relaxed its rules.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace async_device {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
inline c10::Device device() { return {kDeviceType, 0}; }  // there is one

using Work = std::function<void()>;

// ---- streams. Number 0 is the default stream; it does not wait for the others, nor they for it.

inline c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
c10::Stream current_stream();                    // of this thread
c10::Stream set_current_stream(c10::Stream to);  // returns what it was
c10::Stream stream_from_pool(bool is_high_priority);

// Behind all that the stream was given before. `work` must not own tensors of this device.
void enqueue(c10::Stream stream, Work work);

// The same for work that depends on when it is given to the stream: `at_launch` is called by the host at that moment,
// which is now, or at every replay of the graph that is captured now, and returns the work.
void enqueue_at_launch(c10::Stream stream, std::function<Work()> at_launch);

bool is_done(c10::Stream stream);
void synchronize(c10::Stream stream);
void synchronize_device();

// What has failed on a stream, which all later synchronisation raises as c10::Error; none: does nothing.
void raise_failure();
// Fails as work that throws does.
void fail(const std::string& reason);
void forget_failure();

// ---- events

struct Mark;  // one recording of an event

class Event {
 public:
  void record(c10::Stream stream);
  void block(c10::Stream stream) const;  // `stream` waits for the last recording; without one, for nothing
  bool query() const;
  void synchronize() const;
  double milliseconds_until(const Event& later) const;

 private:
  std::shared_ptr<Mark> mark_;
};

// ---- delays

// Before each piece of work, with this probability, a delay of up to so many microseconds. The numbers follow from the
// seed and the stream alone. Applies to all streams at once.
void set_delays(uint64_t seed, double probability, int64_t max_microseconds);

// ---- graphs

class Graph;

// Captures what the current stream is given, and what streams are given that wait for it, until end_capture.
std::shared_ptr<Graph> begin_capture();
// Throws c10::Error where a rule was broken, or a stream that joined the capture was not waited for.
void end_capture(const std::shared_ptr<Graph>& graph);
// On the current stream.
void replay(const Graph& graph);

bool is_capturing(c10::Stream stream);
const Graph* capturing_graph(c10::Stream stream);  // none: null
bool is_capturing_anywhere();
// Throws, and spoils the captures that are under way, if there are any and this thread's rules are not relaxed.
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
