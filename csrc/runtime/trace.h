// Traces: the start and end times of the instructions of all programs (sw.debug.trace). At most one trace is taken at a
// time.
#pragma once

#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace shardwright {

// One instruction of one run. Times are seconds since the trace began. On CPU a transfer starts when it is passed to
// the process group, and ends when the host has waited for it. On a GPU the times are when the stream runs it.
struct TraceEvent {
  std::string lane;         // "compute" or "communication"
  std::string instruction;  // its text in program listings
  int64_t chunk = -1;       // the chunk of a product, or -1
  int64_t run = 0;          // number of the run, from next_run_number
  double start = 0;
  double end = 0;
};

// True while a trace is being taken.
bool is_tracing();
// Begins a trace. Discards the events of a trace that was not ended.
void begin_trace();
// Ends the trace and returns its events; none without a trace. Waits until GPUs have finished the recorded
// instructions. Transfers that nobody has waited for are left out.
std::vector<TraceEvent> end_trace();

// Measures one instruction, from the construction to stop() or stop_at(). Does nothing without a trace. A span whose
// trace has ended before is left out. The constructor's arguments are fields of TraceEvent.
class TraceSpan {
 public:
  TraceSpan() = default;
  TraceSpan(const char* lane, std::string instruction, int64_t chunk, int64_t run);

  // Ends the instruction now, on the host's clock, and adds it to the trace.
  void stop();
  // Makes the time of a device event the start of the instruction.
  void start_at(c10::Event event) { device_start_ = std::make_shared<c10::Event>(std::move(event)); }
  // Makes the time of a device event the end of the instruction, and adds the instruction to the trace. Call start_at
  // before.
  void stop_at(c10::Event event);

 private:
  TraceEvent event_;
  std::shared_ptr<c10::Event> device_start_;
  int64_t trace_ = 0;  // number of the trace that this span belongs to; 0: none
};

// Returns 1, 2, 3, ... in the order of calls.
int64_t next_run_number();

}  // namespace shardwright
