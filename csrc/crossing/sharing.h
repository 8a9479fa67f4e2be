// How ranks that hold the same share what is sent of it.
#pragma once

#include <cstdint>
#include <string>

namespace shardwright {

// Of an exchange, or of a crossing (crossing/crossing.h), which is never kNone. kNone: each receiver reads from the one
// with its own coordinates. kMessages: each sends an equal number of whole messages. kBytes: each sends as much, to the
// element, which splits some messages.
enum class Sharing : uint8_t { kNone, kMessages, kBytes };

const char* sharing_name(Sharing sharing);       // "none", "messages" or "bytes"
Sharing parse_sharing(const std::string& name);  // throws UserError

}  // namespace shardwright
