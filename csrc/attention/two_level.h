// Ulysses within a node, and a ring between nodes.
//
// Rank i of a node computes the i-th share of the heads for the rows of its whole node. So it forms a ring with the
// i-th ranks of the other nodes, and a node receives each key once: 1 / ranks_per_node of the data of a ring of all
// ranks.
#pragma once

#include "attention/parts.h"

namespace shardwright {

// Emit one direction. `all` writes for all ranks, and its method is kTwoLevel.
void emit_two_level_forward(AttentionWriter& all, const ForwardTensors& tensors);
void emit_two_level_backward(AttentionWriter& all, const BackwardTensors& tensors);

}  // namespace shardwright
