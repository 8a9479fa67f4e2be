// The traffic of transfers.
#pragma once

#include <cstdint>

#include "program/program.h"

namespace shardwright {

// The traffic of one rank in one transfer. For an all-reduce by the transport it is that of a ring: every rank
// passes on 2 (k - 1) messages, each of a k-th of the data.
struct TransferTraffic {
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  int64_t received_messages = 0;
  int64_t sent_messages = 0;

  // In both directions.
  int64_t bytes() const { return received_bytes + sent_bytes; }
  int64_t messages() const { return received_messages + sent_messages; }
};

// Returns zeros for instructions that compute or wait. What a rank sends itself in an all-to-all is not counted.
TransferTraffic traffic_of(const Program& program, const Operation& operation);

// The part of the messages of `transfer` that goes to and comes from ranks on the same node as this one, where nodes
// are `ranks_per_node` consecutive ranks; zeros if that is 0.
TransferTraffic traffic_inside_node(const Program& program, const SendReceive& transfer, int64_t ranks_per_node);

}  // namespace shardwright
