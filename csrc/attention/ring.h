// The methods that cut the sequence alone (ring, gather, serial), on tensors of this rank's rows.
#pragma once

#include "attention/parts.h"

namespace shardwright {

// Emit the instructions of a forward or backward. All ranks of the writer compute the heads of `share`, and each tensor
// begins with the first of these heads.
void emit_forward(AttentionWriter& writer, const HeadShare& share, const ForwardTensors& tensors);
void emit_backward(AttentionWriter& writer, const HeadShare& share, const BackwardTensors& tensors);

}  // namespace shardwright
