// Names from outside are UTF-8, or no text could be made of what they stand in.
#pragma once

#include <string>
#include <string_view>

namespace shardwright {

// By RFC 3629: no overlong forms, no surrogates, nothing beyond U+10FFFF.
bool is_utf8(std::string_view text);

// Throws UserError naming `argument` and the bytes, those that are not ASCII as \xff.
void check_utf8(const std::string& text, const char* argument);

}  // namespace shardwright
