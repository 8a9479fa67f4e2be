// The traffic of transfers.
#pragma once

#include <cstdint>

#include "program/program.h"

namespace shardwright {

// What one rank receives and sends in one transfer. For an all-reduce by the transport it is that of a ring: every rank
// passes on 2 (k - 1) messages, each of a k-th of the data.
struct TransferTraffic {
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  int64_t received_messages = 0;
  int64_t sent_messages = 0;
};

// Returns zeros for instructions that compute or wait. What a rank sends itself in an all-to-all is not counted.
TransferTraffic traffic_of(const Program& program, const Operation& operation);

}  // namespace shardwright
