// Predicts the time of a move from what its worst rank does. All ranks use the same table and integers, so ties break
// alike everywhere.
#pragma once

#include <cstdint>
#include <optional>

#include "cost/topology.h"

namespace shardwright {

// Wire traffic, exact, in bytes and messages; received and sent by the rank at one position.
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

// The figures of one step. Each is the maximum over all ranks, not necessarily of the same rank.
struct StepFigures {
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  int64_t messages = 0;       // received
  int64_t touched_bytes = 0;  // of local copies: what is held afterwards
  int64_t collectives = 1;    // one after the other
  int64_t sent_messages = 0;
  // Of crossings that prefer a rank's own node: the larger of bytes received and sent, within nodes and between them.
  // They are costed by the link that they take.
  struct ByLink {
    int64_t inside = 0;
    int64_t between = 0;
  };
  std::optional<ByLink> by_link = std::nullopt;
};

// Step latency + the larger of messages received and sent x message latency + the larger of bytes received and sent
// over the slowest link that the group crosses + local copies. A local step only copies.
int64_t predicted_picoseconds(bool local, const StepFigures& figures, const Link& link, const Topology& topology);

// The time for some bytes at a rate, a product and a sum. All saturate at a ceiling that is low enough for the sums of
// a plan not to overflow.
int64_t scaled(int64_t bytes, int64_t ps_per_kib);
int64_t saturating_product(int64_t a, int64_t b);
int64_t saturating_sum(int64_t a, int64_t b);

}  // namespace shardwright
