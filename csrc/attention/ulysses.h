// Ulysses: ranks exchange their part of the sequence for a share of the heads, and back.
#pragma once

#include "attention/attention.h"
#include "program/program.h"

namespace shardwright {

// Return a rank's forward and backward program, with the inputs and outputs of compile_attention and
// compile_attention_backward (compile.h). Throw as these functions do.
Program compile_ulysses(const Attention& attention, Rank rank);
Program compile_ulysses_backward(const Attention& attention, Rank rank);

}  // namespace shardwright
