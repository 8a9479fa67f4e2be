// Names that come from outside must be UTF-8, because Python could not decode messages that contain them otherwise.
#pragma once

#include <string>
#include <string_view>

namespace shardwright {

// As in RFC 3629: no overlong forms, no surrogates, nothing beyond U+10FFFF.
bool is_utf8(std::string_view text);

// Throws a UserError that names `argument` and shows the text, with bytes that are not ASCII written as \xff.
void check_utf8(const std::string& text, const char* argument);

}  // namespace shardwright
