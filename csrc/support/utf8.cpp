#include "support/utf8.h"

#include <cstdint>
#include <cstdio>

#include "support/error.h"

namespace shardwright {
namespace {

// Returns the text with bytes that are not printable ASCII written as \x and two hex digits.
std::string with_escapes(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out.push_back(c);
    } else {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\x%02x", byte);
      out += escaped;
    }
  }
  return out;
}

}  // namespace

bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const size_t length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    if ((first >= 0x80 && first < 0xc2) || first > 0xf4 || length > text.size() - i) return false;
    uint32_t code = length == 1 ? first : first & (0x7fu >> length);
    for (size_t k = 1; k < length; ++k) {
      const auto next = static_cast<unsigned char>(text[i + k]);
      if ((next & 0xc0) != 0x80) return false;
      code = code << 6 | (next & 0x3f);
    }
    constexpr uint32_t kMinCode[]{0, 0, 0x80, 0x800, 0x10000};  // indexed by length; a smaller code is an overlong form
    if (code < kMinCode[length] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return false;
    i += length;
  }
  return true;
}

void check_utf8(const std::string& text, const char* argument) {
  if (!is_utf8(text)) throw UserError(concat(argument, " must be UTF-8 text, got '", with_escapes(text), "'"));
}

}  // namespace shardwright
