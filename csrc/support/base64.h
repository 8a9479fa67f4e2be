// Base64 as in RFC 4648, with '+', '/' and '='.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace shardwright {

std::string to_base64(std::string_view bytes);
// Returns the bytes that the text up to its first '=' encodes, or nullopt if that part has a character that is not a
// base64 digit. The padding may be missing.
std::optional<std::string> from_base64(std::string_view text);

}  // namespace shardwright
