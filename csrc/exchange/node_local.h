// Divides the elements that receivers need of one part of the source among the part's candidate senders. A receiver's
// own node comes first.
//
// On each node, the node's senders divide the elements that its receivers need, so that these elements do not enter the
// node. But no sender sends more than a limit within its node. The remaining elements are divided among all senders so
// that the busiest sends as little as possible. Example: nodes of two ranks and a limit of 20. Ranks 0 and 2 hold a
// part of which ranks 1, 3, 5 and 7 need 10 elements each:
//
//   within nodes     0 -> 1: 10    2 -> 3: 10
//   between nodes    0 -> 5: 10    2 -> 7: 10
#pragma once

#include <cstdint>
#include <vector>

#include "layout/layout.h"
#include "layout/rank.h"

namespace shardwright {

// The elements that a receiver needs of the part.
struct Need {
  Rank rank{};
  int64_t elements = 0;  // above 0
};

// A message from a candidate sender to a receiver.
struct NodeMessage {
  Rank from{};
  Rank to{};
  Interval range;  // within [0, Need::elements) of the receiver
};

// Returns the messages, at most one for each pair of ranks. Nodes are `ranks_per_node` consecutive ranks each. No rank
// may be in both lists, and there must be at least one candidate sender. A sender sends at most `max_within_node`
// elements within its node, which must be at least an even share of all needed elements.
std::vector<NodeMessage> assign_within_nodes(std::vector<Rank> senders, std::vector<Need> needs, int64_t ranks_per_node,
                                             int64_t max_within_node);

}  // namespace shardwright
