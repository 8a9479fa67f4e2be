// The ways in which ranks that hold the same data share the sending.
#pragma once

#include <cstdint>
#include <string>

namespace shardwright {

// The sender of an element that several ranks hold.
//   kAligned        The rank that has the receiver's own coordinates on the mesh dims that replicate the element. Only
//                   for moves on one mesh (exchange/mesh_exchange.h).
//   kWholeMessages  One of the ranks that hold the element. They share the sending, and no message is split.
//   kEvenBytes      One of the ranks that hold the element. They send equally much, as far as possible. Some messages
//                   are split.
//   kNodeLocal      A rank on the receiver's node, up to a limit per sender (exchange/node_local.h). Only for crossings
//                   (exchange/grid_exchange.h).
enum class ReplicaPolicy : uint8_t { kAligned, kWholeMessages, kEvenBytes, kNodeLocal };

const char* replica_policy_name(ReplicaPolicy policy);  // "aligned", "whole_messages", "even_bytes" or "node_local"
ReplicaPolicy parse_replica_policy(const std::string& name);  // throws UserError

}  // namespace shardwright
