// Compiles attention to programs.
#pragma once

#include "attention/attention.h"
#include "program/program.h"

namespace shardwright {

// Inputs: q [batch, heads, rows, depth], k [batch, kv_heads, key_rows, depth] and v [batch, kv_heads, key_rows,
// value_depth], with the rank's rows. Outputs: the result [batch, heads, rows, value_depth], and lse [batch, heads,
// rows] in sum_dtype(), minus infinity where a query sees nothing (its result is zeros). In both directions a mask
// tensor is the last input; its rows must be 1 or the rank's. Throws as check() does, and UserError if the rank is not
// on the mesh.
Program compile_attention(const Attention& attention, Rank rank);

// Inputs: q, k, v, the result, its gradient, and lse. Outputs: the gradients of q, k and v.
Program compile_attention_backward(const Attention& attention, Rank rank);

}  // namespace shardwright
