// Attention in the wire format (support/wire_format.h), and as the string that operators take.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "attention/attention.h"

namespace shardwright {

// Reading throws UserError if the bytes are damaged, of another version, or describe an attention that `check` refuses.
std::string to_bytes(const Attention& attention, bool is_backward);
std::pair<Attention, bool> attention_from_bytes(std::string_view bytes);

// True if these are the bytes of an attention.
bool is_attention(std::string_view bytes);

// "ring attention|base64"
std::string to_text(const Attention& attention, bool is_backward);
// Returns true if the label of a text is one of an attention. Does not decode the text.
bool is_attention_text(std::string_view text);

}  // namespace shardwright
