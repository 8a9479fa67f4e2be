// Attention in the wire format (support/wire_format.h), and as the string that operators take.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "attention/attention.h"

namespace shardwright {

// Returns the attention in the wire format. `is_backward`: true if the bytes stand for the backward program.
std::string to_bytes(const Attention& attention, bool is_backward);
// Returns the attention and is_backward. Throws UserError if the bytes are damaged or of another version, or as check()
// does.
std::pair<Attention, bool> attention_from_bytes(std::string_view bytes);

// Returns true if the first line of the bytes names the kind of an attention. Checks nothing after that line.
bool is_attention(std::string_view bytes);

// Returns "ring attention|base64" or "ring attention backward|base64".
std::string to_text(const Attention& attention, bool is_backward);
// Returns true if the label of a text contains " attention". Does not decode the text.
bool is_attention_text(std::string_view text);

}  // namespace shardwright
