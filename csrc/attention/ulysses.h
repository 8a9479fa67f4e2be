// Ulysses: ranks exchange their part of the sequence for a share of the heads, and back.
#pragma once

#include "attention/attention.h"
#include "program/program.h"

namespace shardwright {

// Inputs and outputs as in compile.h.
Program compile_ulysses(const Attention& attention, Rank rank);
Program compile_ulysses_backward(const Attention& attention, Rank rank);

}  // namespace shardwright
