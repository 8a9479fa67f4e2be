#include "runtime/trace.h"

#include <atomic>
#include <chrono>
#include <mutex>

namespace shardwright {
namespace {

using Clock = std::chrono::steady_clock;

// A measured instruction. If it has device events, their times replace those of `event`.
struct Measurement {
  TraceEvent event;
  std::shared_ptr<c10::Event> device_start;
  std::shared_ptr<c10::Event> device_end;
};

std::mutex mutex;
std::vector<Measurement> measurements;  // of the current trace
Clock::time_point trace_start;          // start of the current trace
std::atomic<int64_t> current_trace{0};  // number of the current trace; 0: none
int64_t last_trace = 0;                 // number of the last trace
std::atomic<int64_t> num_runs{0};       // run numbers returned so far

// Returns the seconds since the current trace began.
double now() { return std::chrono::duration<double>(Clock::now() - trace_start).count(); }

// Adds a measurement to the trace with this number, unless that trace has ended.
void add(int64_t trace, Measurement measurement) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (trace == current_trace) measurements.push_back(std::move(measurement));
}

}  // namespace

bool is_tracing() { return current_trace.load(std::memory_order_relaxed) != 0; }

void begin_trace() {
  const std::lock_guard<std::mutex> lock(mutex);
  measurements.clear();
  trace_start = Clock::now();
  current_trace = ++last_trace;
}

std::vector<TraceEvent> end_trace() {
  std::vector<Measurement> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    current_trace = 0;
    ended.swap(measurements);
  }
  // GPU events give times relative to each other only. The first event is assumed to be at the start of its instruction
  // on the host's clock.
  const Measurement* first = nullptr;
  for (const Measurement& measurement : ended) {
    if (!measurement.device_start) continue;
    measurement.device_end->synchronize();
    if (first == nullptr) first = &measurement;
  }
  std::vector<TraceEvent> events;
  for (const Measurement& measurement : ended) {
    events.push_back(measurement.event);
    if (!measurement.device_start) continue;
    const auto since_first = [&](const c10::Event& event) {
      return first->event.start + first->device_start->elapsedTime(event) / 1e3;
    };
    events.back().start = since_first(*measurement.device_start);
    events.back().end = since_first(*measurement.device_end);
  }
  return events;
}

TraceSpan::TraceSpan(const char* lane, std::string instruction, int64_t chunk, int64_t run)
    : event_{lane, std::move(instruction), chunk, run, 0, 0}, trace_(current_trace) {
  event_.start = now();
}

void TraceSpan::stop() {
  if (trace_ == 0) return;
  event_.end = now();
  add(std::exchange(trace_, 0), {std::move(event_), nullptr, nullptr});
}

void TraceSpan::stop_at(c10::Event event) {
  if (trace_ == 0) return;
  add(std::exchange(trace_, 0),
      {std::move(event_), std::move(device_start_), std::make_shared<c10::Event>(std::move(event))});
}

int64_t next_run_number() { return ++num_runs; }

}  // namespace shardwright
