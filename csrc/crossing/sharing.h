// How ranks that hold the same data share the sending of it.
#pragma once

#include <cstdint>
#include <string>

namespace shardwright {

// For exchanges, and for crossings (crossing/crossing.h), which are never kNone. kNone: each receiver receives from the
// holder with its own coordinates. kMessages: the holders share the sending in whole messages. kBytes: all holders send
// equally much, to the element, which splits some messages.
enum class Sharing : uint8_t { kNone, kMessages, kBytes };

const char* sharing_name(Sharing sharing);       // "none", "messages" or "bytes"
Sharing parse_sharing(const std::string& name);  // throws UserError

}  // namespace shardwright
