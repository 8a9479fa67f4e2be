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
  int64_t touched_bytes = 0;  // bytes of local copies: those held after the step
  int64_t collectives = 1;    // collectives that run one after the other
  int64_t sent_messages = 0;
  // Set only for crossings that prefer senders on the receiver's node: the larger of bytes received and sent, within
  // nodes and between nodes. Each is costed with its own link.
  struct ByLink {
    int64_t inside = 0;
    int64_t between = 0;
  };
  std::optional<ByLink> by_link = std::nullopt;
};

// Raises each maximum to the count of one rank if that is higher.
void raise_to(StepCounts& maxima, const Traffic& traffic);

// Returns the predicted time of a step: collectives x step latency + max(messages received, sent) x message latency +
// max(bytes received, sent) over `link` (the slowest link of the group) + local copies. A local step only copies.
//
// Example: one collective in which the worst rank receives 8 MiB in 7 messages, over 200 GB/s (5,120 ps per KiB), with
// 12 us per step, 1 us per message and copies of 8 MiB at 682 ps per KiB: 12 + 7 + 41.9 + 5.6 = 66.5 us.
int64_t predicted_picoseconds(bool local, const StepCounts& counts, const Link& link, const Topology& topology);

// Saturating arithmetic. The ceiling is 2^60, so that the sums of a plan do not overflow.
//
// Returns the time to move `bytes` at this rate, in picoseconds, rounded down.
int64_t picoseconds_for(int64_t bytes, int64_t ps_per_kib);
int64_t saturating_product(int64_t a, int64_t b);
int64_t saturating_sum(int64_t a, int64_t b);

}  // namespace shardwright
