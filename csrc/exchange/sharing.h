// The ways in which ranks that hold the same data share the sending of it.
#pragma once

#include <cstdint>
#include <string>

namespace shardwright {

// For exchanges, and for crossings (exchange/grid_exchange.h), which are never kNone. kNone: each receiver receives
// from the holder with its own coordinates. kMessages: the holders share the sending in whole messages. kBytes: all
// holders send equally much, to the element, which splits some messages. kNodes, for crossings alone: receivers are
// served by holders on their own node where there are any (exchange/node_sharing.h).
enum class Sharing : uint8_t { kNone, kMessages, kBytes, kNodes };

const char* sharing_name(Sharing sharing);       // "none", "messages", "bytes" or "nodes"
Sharing parse_sharing(const std::string& name);  // throws UserError

}  // namespace shardwright
