// The ways in which ranks that hold the same data share the sending.
#pragma once

#include <cstdint>
#include <string>

namespace shardwright {

// The sender of an element that several ranks hold.
//   kNone      The sender with the receiver's own coordinates. Not for crossings (exchange/grid_exchange.h).
//   kMessages  The senders divide the elements in whole messages.
//   kBytes     All senders send equally many elements, which splits some messages.
//   kNodes     A sender on the receiver's own node if there is one (exchange/node_local.h). Only for crossings.
enum class ReplicaPolicy : uint8_t { kAligned, kWholeMessages, kEvenBytes, kNodeLocal };

const char* replica_policy_name(ReplicaPolicy policy);  // "aligned", "whole_messages", "even_bytes" or "node_local"
ReplicaPolicy parse_replica_policy(const std::string& name);  // throws UserError

}  // namespace shardwright
