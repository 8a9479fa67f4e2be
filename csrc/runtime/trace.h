// What programs did, and when. Recorded only while a trace is being taken.
#pragma once

#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace shardwright {

// One instruction of one run; times are seconds since the trace began. A transfer lasts from when it was given to the
// process group (on a GPU, from when its stream came to it) to when it was seen to be done.
struct TraceEvent {
  std::string lane;         // "compute" or "communication"
  std::string instruction;  // as listings show it
  int64_t chunk = -1;       // of a pipeline
  int64_t run = 0;          // programs, numbered as they were started
  double start = 0;
  double end = 0;
};

bool is_tracing();
void begin_trace();
// Waits for what is still under way on GPUs. Transfers that nobody has waited for are left out.
std::vector<TraceEvent> end_trace();

// Records one instruction, from construction to stop(). Does nothing without a trace.
class TraceSpan {
 public:
  TraceSpan() = default;
  TraceSpan(const char* lane, std::string instruction, int64_t chunk, int64_t run);

  void stop();
  // On a GPU.
  void start_at(c10::Event event) { device_start_ = std::make_shared<c10::Event>(std::move(event)); }
  void stop_at(c10::Event event);

 private:
  TraceEvent event_;
  std::shared_ptr<c10::Event> device_start_;
  int64_t trace_ = 0;  // which one; 0: none
};

int64_t next_run_number();

}  // namespace shardwright
