// Base64 as in RFC 4648, with '+', '/' and '='.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace shardwright {

// Returns the bytes as text, padded with '=' to a multiple of 4 characters.
std::string to_base64(std::string_view bytes);
// Returns the bytes that the text up to its first '=' encodes, or nullopt if that part has a character that is not a
// base64 digit. The padding may be missing. Bits after the last complete byte are dropped.
std::optional<std::string> from_base64(std::string_view text);

}  // namespace shardwright
