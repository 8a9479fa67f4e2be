#include "cost/cost.h"

#include <algorithm>

namespace shardwright {
namespace {

constexpr int64_t kCeiling = int64_t{1} << 60;

int64_t saturated(__int128 exact) { return exact > kCeiling ? kCeiling : static_cast<int64_t>(exact); }

}  // namespace

int64_t picoseconds_for(int64_t bytes, int64_t ps_per_kib) {
  return saturated(static_cast<__int128>(bytes) * ps_per_kib / 1024);
}

int64_t saturating_product(int64_t a, int64_t b) { return saturated(static_cast<__int128>(a) * b); }

int64_t saturating_sum(int64_t a, int64_t b) { return std::min(a + b, kCeiling); }

void raise_to(StepCounts& maxima, const Traffic& traffic) {
  maxima.received_bytes = std::max(maxima.received_bytes, traffic.received_bytes);
  maxima.sent_bytes = std::max(maxima.sent_bytes, traffic.sent_bytes);
  maxima.messages = std::max(maxima.messages, traffic.messages);
  maxima.sent_messages = std::max(maxima.sent_messages, traffic.sent_messages);
}

int64_t predicted_picoseconds(bool is_local, const StepCounts& counts, const Link& link, const Topology& topology) {
  const int64_t copies = picoseconds_for(counts.touched_bytes, topology.memory_ps_per_kib);
  if (is_local) return copies;
  int64_t wire = picoseconds_for(std::max(counts.received_bytes, counts.sent_bytes), link.ps_per_kib);
  if (counts.by_link) {
    wire = std::min(wire, saturating_sum(picoseconds_for(counts.by_link->inside, topology.inside.ps_per_kib),
                                         picoseconds_for(counts.by_link->between, topology.between.ps_per_kib)));
  }
  const int64_t messages = std::max(counts.messages, counts.sent_messages);
  const int64_t latency =
      saturating_sum(counts.collectives * topology.step_ps, saturating_product(messages, link.message_ps));
  return saturating_sum(saturating_sum(copies, wire), latency);
}

}  // namespace shardwright
