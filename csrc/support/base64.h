// Base64 as in RFC 4648, with '+', '/' and '='.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace shardwright {

std::string to_base64(std::string_view bytes);
// Returns the bytes, or nullopt if the text has a character that is not of base64. The padding '=' may be missing.
std::optional<std::string> from_base64(std::string_view text);

}  // namespace shardwright
