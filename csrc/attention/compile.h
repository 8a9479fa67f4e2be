// Compiles attention to programs.
#pragma once

#include "attention/attention.h"
#include "program/program.h"

namespace shardwright {

// Returns the forward program of a rank. `rows` and `key_rows` are the rank's numbers of rows.
//
//   inputs   q [batch, heads, rows, depth], k [batch, kv_heads, key_rows, depth], v [batch, kv_heads, key_rows,
//            value_depth], and the mask tensor if there is one; its rows must be 1 or the rank's
//   outputs  the result [batch, heads, rows, value_depth], and lse [batch, heads, rows] in sum_dtype(), the logarithms
//            of the sums of the exponentials of each query's scores
//
// A query that sees no key has a result of zeros and an lse of minus infinity.
//
// Throws UserError as check() does, and if the rank is not on the mesh.
Program compile_attention(const Attention& attention, Rank rank);

// Returns the backward program of a rank. Inputs: q, k, v, the result, the gradient of the result, lse, and the mask
// tensor if there is one. Outputs: the gradients of q, k and v. Throws as compile_attention does.
Program compile_attention_backward(const Attention& attention, Rank rank);

}  // namespace shardwright
