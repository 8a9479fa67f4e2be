// Predicts the time of a move from the counts of its slowest rank. Costs are integers from the same table on all ranks,
// so all ranks break ties in the same way.
#pragma once

#include <cstdint>
#include <optional>

#include "cost/topology.h"

namespace shardwright {

// The bytes and messages that one rank receives and sends.
struct Traffic {
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  int64_t messages = 0;  // received
  int64_t sent_messages = 0;

  Traffic operator+(const Traffic& other) const {
    return {received_bytes + other.received_bytes, sent_bytes + other.sent_bytes, messages + other.messages,
            sent_messages + other.sent_messages};
  }
  bool operator==(const Traffic& other) const = default;
};

// Counts of one step. Each is a maximum over all ranks; the maxima may be of different ranks.
struct StepCounts {
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  int64_t messages = 0;       // received
  int64_t touched_bytes = 0;  // bytes that local copies write: all bytes that the rank holds after the step
  int64_t collectives = 1;    // collectives that run one after the other
  int64_t sent_messages = 0;
  // Bytes within nodes and between nodes, each the larger of the bytes received and sent. Set only for crossings that
  // prefer senders on the receiver's node. Then the bytes take at most the time of `inside` bytes over Topology::inside
  // plus that of `between` bytes over Topology::between.
  struct ByLink {
    int64_t inside = 0;
    int64_t between = 0;
  };
  std::optional<ByLink> by_link = std::nullopt;
};

// Raises the maxima of bytes and messages, received and sent, to the counts of one rank where its counts are higher.
void raise_to(StepCounts& maxima, const Traffic& traffic);

// Returns the predicted time of a step: collectives x step latency + max(messages received, sent) x message latency +
// max(bytes received, sent) over `link` (the slowest link of the group) + local copies. If counts.by_link is set, the
// time of the bytes is limited as StepCounts states. A step with `is_local` costs only its local copies.
//
// Example: one collective in which the worst rank receives 8 MiB in 7 messages, over 200 GB/s (5,120 ps per KiB), with
// 12 us per step, 1 us per message and copies of 8 MiB at 682 ps per KiB: 12 + 7 + 41.9 + 5.6 = 66.5 us.
int64_t predicted_picoseconds(bool is_local, const StepCounts& counts, const Link& link, const Topology& topology);

// Arithmetic on non-negative numbers. Results above 2^60 become 2^60, so that the sums of a plan do not overflow. The
// arguments of saturating_sum must be at most 2^62. picoseconds_for returns the time to move `bytes` at this rate,
// rounded down.
int64_t picoseconds_for(int64_t bytes, int64_t ps_per_kib);
int64_t saturating_product(int64_t a, int64_t b);
int64_t saturating_sum(int64_t a, int64_t b);

}  // namespace shardwright
