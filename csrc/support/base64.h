// Bytes as text: RFC 4648, with '+', '/' and '='.
#pragma once

#include <string>
#include <string_view>

namespace shardwright {

std::string to_base64(std::string_view bytes);
// Throws UserError on other characters; padding may be missing.
std::string from_base64(std::string_view text);

}  // namespace shardwright
