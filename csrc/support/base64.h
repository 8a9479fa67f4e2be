// Base64 as in RFC 4648, with '+', '/' and '='.
#pragma once

#include <string>
#include <string_view>

namespace shardwright {

std::string to_base64(std::string_view bytes);
// Padding may be missing. Throws UserError on other characters.
std::string from_base64(std::string_view text);

}  // namespace shardwright
