// Records the times of the instructions of all programs, while a trace is being taken (sw.debug.trace). At most one
// trace is taken at a time.
#pragma once

#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace shardwright {

// One instruction of one run. Times are seconds since the trace began. A transfer starts when it is passed to the
// process group (on a GPU: when its stream reaches it), and ends when it is seen to be done.
struct TraceEvent {
  std::string lane;         // "compute" or "communication"
  std::string instruction;  // its text in program listings
  int64_t chunk = -1;       // the chunk of a product, or -1
  int64_t run = 0;          // number of the run, in the order of starts
  double start = 0;
  double end = 0;
};

bool is_tracing();   // true while a trace is being taken
void begin_trace();  // drops the events of a trace that was not ended
// Ends the trace and returns its events. Waits for everything that still runs on GPUs. Transfers that nobody has waited
// for are left out.
std::vector<TraceEvent> end_trace();

// Records one instruction, from construction to stop(). Does nothing without a trace.
class TraceSpan {
 public:
  TraceSpan() = default;
  TraceSpan(const char* lane, std::string instruction, int64_t chunk, int64_t run);

  // Records the span, with the host's time as its end.
  void stop();
  // Set the device's start and end instead of the host's. stop_at also records the span.
  void start_at(c10::Event event) { device_start_ = std::make_shared<c10::Event>(std::move(event)); }
  void stop_at(c10::Event event);

 private:
  TraceEvent event_;
  std::shared_ptr<c10::Event> device_start_;
  int64_t trace_ = 0;  // number of the trace; 0: none
};

// Returns 1, 2, 3, ... in the order of calls.
int64_t next_run_number();

}  // namespace shardwright
