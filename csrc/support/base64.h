// Base64 as in RFC 4648, with '+', '/' and '='.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace shardwright {

std::string to_base64(std::string_view bytes);
// Returns nullopt if the text has other characters. Padding may be missing.
std::optional<std::string> from_base64(std::string_view text);

}  // namespace shardwright
