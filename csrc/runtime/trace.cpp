#include "runtime/trace.h"

#include <atomic>
#include <chrono>
#include <mutex>

namespace shardwright {
namespace {

using Clock = std::chrono::steady_clock;

// A recorded span. If it has device events, their times replace those of `event`.
struct Recorded {
  TraceEvent event;
  std::shared_ptr<c10::Event> device_start;
  std::shared_ptr<c10::Event> device_end;
};

std::mutex mutex;
std::vector<Recorded> recorded;   // spans of the current trace
Clock::time_point began;          // start of the current trace
std::atomic<int64_t> current{0};  // number of the current trace; 0: none
int64_t last = 0;                 // number of the last trace
std::atomic<int64_t> runs{0};     // run numbers given so far

// Returns the seconds since the current trace began.
double now() { return std::chrono::duration<double>(Clock::now() - began).count(); }

// Stores a span, unless its trace has ended.
void keep(int64_t trace, Recorded span) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (trace == current) recorded.push_back(std::move(span));
}

}  // namespace

bool is_tracing() { return current.load(std::memory_order_relaxed) != 0; }

void begin_trace() {
  const std::lock_guard<std::mutex> lock(mutex);
  recorded.clear();
  began = Clock::now();
  current = ++last;
}

std::vector<TraceEvent> end_trace() {
  std::vector<Recorded> spans;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    current = 0;
    spans.swap(recorded);
  }
  // GPU times are relative to the first GPU event, which is taken to be at its instruction's start on the host's clock.
  const Recorded* first = nullptr;
  for (const Recorded& span : spans) {
    if (!span.device_start) continue;
    span.device_end->synchronize();
    if (first == nullptr) first = &span;
  }
  std::vector<TraceEvent> events;
  for (const Recorded& span : spans) {
    events.push_back(span.event);
    if (!span.device_start) continue;
    const auto since_first = [&](const c10::Event& event) {
      return first->event.start + first->device_start->elapsedTime(event) / 1e3;
    };
    events.back().start = since_first(*span.device_start);
    events.back().end = since_first(*span.device_end);
  }
  return events;
}

TraceSpan::TraceSpan(const char* lane, std::string instruction, int64_t chunk, int64_t run)
    : event_{lane, std::move(instruction), chunk, run, 0, 0}, trace_(current) {
  event_.start = now();
}

void TraceSpan::stop() {
  if (trace_ == 0) return;
  event_.end = now();
  keep(std::exchange(trace_, 0), {std::move(event_), nullptr, nullptr});
}

void TraceSpan::stop_at(c10::Event event) {
  if (trace_ == 0) return;
  keep(std::exchange(trace_, 0),
       {std::move(event_), std::move(device_start_), std::make_shared<c10::Event>(std::move(event))});
}

int64_t next_run_number() { return ++runs; }

}  // namespace shardwright
