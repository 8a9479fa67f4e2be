#include "program/step_memory.h"

namespace shardwright {
namespace {

// Emits the copy of the elements that stay on the rank, in the first round.
void copy_own(Sketch& sketch, int64_t own, int64_t round, int current, int next) {
  if (own > 0 && round == 0) sketch.emit({current, next});
}

}  // namespace

void write_all_to_all(Sketch& sketch, const BothLoads& loads, int64_t own, int64_t round, int64_t rounds, int current,
                      int next) {
  const auto packed = [](const Loads& some) {
    return (some.sent.is_run() ? 0 : some.sent.total()) + (some.received.is_run() ? 0 : some.received.total());
  };
  const bool carries_own = rounds == 1 && sends_own_part(packed(loads.with), packed(loads.without), own);
  const Loads& carried = carries_own ? loads.with : loads.without;
  const int from = carried.sent.is_run() ? current : sketch.new_buffer(carried.sent.total());
  const int to = carried.received.is_run() ? next : sketch.new_buffer(carried.received.total());
  if (from != current) sketch.emit({current, from});
  sketch.emit({from, to});
  if (!carries_own) copy_own(sketch, own, round, current, next);
  sketch.wait({from, to});
  if (to != next) sketch.emit({to, next});
}

void write_messages(Sketch& sketch, const Packed& packed, int64_t own, int64_t round, int current, int next) {
  const int sending = packed.sent > 0 ? sketch.new_buffer(packed.sent) : kNoBuffer;
  const int receiving = packed.received > 0 ? sketch.new_buffer(packed.received) : kNoBuffer;
  const int sent = packed.sent_runs > 0 ? current : kNoBuffer;
  const int received = packed.received_runs > 0 ? next : kNoBuffer;
  if (sending != kNoBuffer) sketch.emit({current, sending});
  const bool exchanges = packed.sent + packed.sent_runs + packed.received + packed.received_runs > 0;
  if (exchanges) sketch.emit({sent, sending, received, receiving});
  copy_own(sketch, own, round, current, next);
  if (exchanges) sketch.wait({sent, sending, received, receiving});
  if (receiving != kNoBuffer) sketch.emit({receiving, next});
}

}  // namespace shardwright
