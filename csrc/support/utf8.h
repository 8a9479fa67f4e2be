// UTF-8 checks for names given by users. Python cannot decode an error message with bytes that are not UTF-8.
#pragma once

#include <string>
#include <string_view>

namespace shardwright {

// Returns true if the text is UTF-8 as in RFC 3629: no overlong forms, no surrogates, nothing beyond U+10FFFF.
bool is_utf8(std::string_view text);

// Throws UserError unless `text` is UTF-8. The error names `argument` and shows the text, with bytes that are not
// printable ASCII written as \x and two hex digits.
void check_utf8(const std::string& text, const char* argument);

}  // namespace shardwright
