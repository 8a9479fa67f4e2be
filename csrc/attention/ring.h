// The methods that cut the sequence alone (ring, gather, serial), on tensors of this rank's rows.
#pragma once

#include "attention/parts.h"

namespace shardwright {

// The ranks of the writer hold the same heads, those of `share`, which all tensors begin with.
void emit_forward(AttentionWriter& writer, const HeadShare& share, const ForwardTensors& tensors);
void emit_backward(AttentionWriter& writer, const HeadShare& share, const BackwardTensors& tensors);

}  // namespace shardwright
