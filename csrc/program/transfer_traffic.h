// Bytes and messages of transfers.
#pragma once

#include <cstdint>

#include "program/program.h"

namespace shardwright {

// The traffic of one rank in one transfer. For the transport's all-reduce it is the traffic of a ring of k ranks: every
// rank forwards 2 (k - 1) messages, each 1/k of the data.
struct TransferTraffic {
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  int64_t received_messages = 0;
  int64_t sent_messages = 0;

  // Sums of both directions.
  int64_t bytes() const { return received_bytes + sent_bytes; }
  int64_t messages() const { return received_messages + sent_messages; }
};

// Returns the traffic of a transfer, without a rank's message to itself, and zeros for other instructions. An
// all-to-all counts one message in each direction per peer, even if it is empty.
TransferTraffic traffic_of(const Program& program, const Operation& operation);

// Returns the traffic of the messages of `transfer` whose peer is on the same node as this rank. Nodes are
// `ranks_per_node` consecutive ranks; returns zeros if that is 0.
TransferTraffic traffic_inside_node(const Program& program, const SendReceive& transfer, int64_t ranks_per_node);

}  // namespace shardwright
