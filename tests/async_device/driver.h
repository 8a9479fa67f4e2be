// The driver of a device for tests: memory is the host's, and everything else is as asynchronous as on a GPU.
//
// A stream is a thread that does its work in order, each piece after a random delay. So code that forgets to wait for
// another stream, or frees memory that another stream still uses, fails sooner or later, on any machine. Freed memory
// is overwritten with poison, in the order of its stream (allocator.h).
//
// As on a GPU,
// - work on a stream keeps no memory alive,
// - only events order streams,
// - a failure on a stream is raised by the next call that synchronizes, and by every later one,
// - while a graph is captured, the work of its streams is recorded for replays and not done now; querying and
//   synchronizing are errors that end the capture, unless the thread has relaxed its rules.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace async_device {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
constexpr int kNumDevices = 2;

c10::Device device();                            // the current device of this thread
c10::Device set_device(c10::DeviceIndex index);  // returns the previous one

// Makes a device current during its lifetime.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device) : before_(set_device(device.index())) {}
  ~OnDevice() { set_device(before_.index()); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::Device before_;
};

using Work = std::function<void()>;

// ---- streams. With ASYNC_DEVICE_QUEUES=n in the environment, the streams of a device share n queues, so that work
// also waits for earlier work of other streams, as on a GPU with few connections. Stream numbers begin at kFirstStream
// times the device. The first stream of each device is its default stream, which does not wait for the others, nor they
// for it.

constexpr c10::StreamId kFirstStream = 1000;
inline c10::Stream stream_of(c10::StreamId id) {
  const auto index = static_cast<c10::DeviceIndex>(id / kFirstStream);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, index), id);
}
inline c10::Stream default_stream(c10::Device of) { return stream_of(of.index() * kFirstStream); }
c10::Stream current_stream();  // the current stream of this thread, on its current device
c10::Stream current_stream(c10::Device of);
c10::Stream set_current_stream(c10::Stream to);       // of the stream's device; returns the previous one
c10::Stream stream_from_pool(bool is_high_priority);  // of the current device

// Adds work after all earlier work of the stream. `work` must not own tensors of this device.
void enqueue(c10::Stream stream, Work work);

// The same for the work of a kernel, whose launch may be refused: refuse_launch(number) makes the launch with this
// number from now on, counted from 1, throw c10::Error and do nothing. 0 refuses none. launches_before_refusal returns
// the number of launches up to it, or 0 if none will be refused.
void launch(c10::Stream stream, Work work);
void refuse_launch(int64_t number);
int64_t launches_before_refusal();

// The same for work that depends on the time of its launch: the host calls `at_launch` at that time, which is now, or
// at every replay of the graph that is being captured. `at_launch` returns the work.
void enqueue_at_launch(c10::Stream stream, std::function<Work()> at_launch);

bool is_done(c10::Stream stream);
void synchronize(c10::Stream stream);
void synchronize_device();

// Raises the failure of a stream as c10::Error, as all synchronization does. Does nothing if there is none.
void raise_failure();
// Fails like work that throws.
void fail(const std::string& reason);
void forget_failure();

// Requests of this process to the driver since the start.
struct Counts {
  int64_t works = 0;   // pieces of work, as launches of kernels and copies are
  int64_t events = 0;  // recorded events
  int64_t waits = 0;   // waits of streams for events
};
Counts counts();

// Makes launches, operations of process groups and allocations on this device throw c10::Error; -1 allows them again.
// For tests whose tensors are all on the other device.
void forbid_device(c10::DeviceIndex index);
void check_allowed(c10::Device of);

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
// Throws c10::Error if a rule was broken, or if no captured stream waits for a stream that joined the capture.
void end_capture(const std::shared_ptr<Graph>& graph);
// Replays the graph on the current stream.
void replay(const Graph& graph);

bool is_capturing(c10::Stream stream);
std::shared_ptr<Graph> graph_captured_on(c10::Stream stream);  // null if there is none
const Graph* capturing_graph(c10::Stream stream);              // null if there is none
bool is_capturing_anywhere();
// If captures are under way and this thread's rules are not relaxed, invalidates them and throws.
void forbid_in_capture(const char* what);

// Relaxes the rules for this thread during its lifetime, as cudaStreamCaptureModeRelaxed does.
class RelaxedRules {
 public:
  RelaxedRules();
  ~RelaxedRules();
  RelaxedRules(const RelaxedRules&) = delete;
  RelaxedRules& operator=(const RelaxedRules&) = delete;
};

}  // namespace async_device
