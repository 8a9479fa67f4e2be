#include "program/step_memory.h"

namespace shardwright {
namespace {

// Emits the copy of the elements that stay on the rank, in the first round.
void copy_own(Sketch& sketch, int64_t own, int64_t round, int current, int next) {
  if (own > 0 && round == 0) sketch.emit({current, next});
}

}  // namespace

void sketch_all_to_all(Sketch& sketch, const AllToAllOptions& options, int64_t own, int64_t round, int64_t rounds,
                       int current, int next) {
  const auto num_packed = [](const RoundMessages& messages) {
    return (messages.sent.is_run() ? 0 : messages.sent.total()) +
           (messages.received.is_run() ? 0 : messages.received.total());
  };
  const bool sends_own =
      rounds == 1 && sends_own_part(num_packed(options.with_own), num_packed(options.without_own), own);
  const RoundMessages& chosen = sends_own ? options.with_own : options.without_own;
  const int from = chosen.sent.is_run() ? current : sketch.new_buffer(chosen.sent.total());
  const int to = chosen.received.is_run() ? next : sketch.new_buffer(chosen.received.total());
  if (from != current) sketch.emit({current, from});
  sketch.emit({from, to});
  if (!sends_own) copy_own(sketch, own, round, current, next);
  sketch.wait({from, to});
  if (to != next) sketch.emit({to, next});
}

void sketch_messages(Sketch& sketch, const PackingCounts& counts, int64_t own, int64_t round, int current, int next) {
  const int packed = counts.packed_elements > 0 ? sketch.new_buffer(counts.packed_elements) : kNoBuffer;
  const int unpacked = counts.unpacked_elements > 0 ? sketch.new_buffer(counts.unpacked_elements) : kNoBuffer;
  const int sent_in_place = counts.num_sent_in_place > 0 ? current : kNoBuffer;
  const int received_in_place = counts.num_received_in_place > 0 ? next : kNoBuffer;
  if (packed != kNoBuffer) sketch.emit({current, packed});
  const bool exchanges =
      counts.packed_elements + counts.num_sent_in_place + counts.unpacked_elements + counts.num_received_in_place > 0;
  if (exchanges) sketch.emit({sent_in_place, packed, received_in_place, unpacked});
  copy_own(sketch, own, round, current, next);
  if (exchanges) sketch.wait({sent_in_place, packed, received_in_place, unpacked});
  if (unpacked != kNoBuffer) sketch.emit({unpacked, next});
}

}  // namespace shardwright
