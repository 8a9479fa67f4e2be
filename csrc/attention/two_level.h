// Ulysses within a node, and a ring between nodes.
//
// Rank i of a node computes the i-th share of the heads for the rows of its whole node, in a ring with the i-th ranks
// of the other nodes. So a node receives each key once. In a ring of all ranks, each rank of the node would receive it:
// the node would receive ranks_per_node times as much.
#pragma once

#include "attention/parts.h"

namespace shardwright {

// Emit the instructions of a forward or backward. `all` is a writer for all ranks, and its method must be kTwoLevel.
void emit_two_level_forward(AttentionWriter& all, const ForwardTensors& tensors);
void emit_two_level_backward(AttentionWriter& all, const BackwardTensors& tensors);

}  // namespace shardwright
