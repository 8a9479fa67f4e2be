// Chooses the holder of a part that serves each rank that needs something of it, if holders on the receiver's own node
// come first.
//
// On each node the holders share what the node's ranks need, so that none of it enters the node, unless they would send
// more than a limit. What is left is shared by all holders so that the busiest sends as little as possible. With nodes
// of two ranks and a limit of 20, ranks 0 and 2 hold a part of which ranks 1, 3, 5 and 7 need 10 elements each:
//
//   within nodes     0 -> 1: 10    2 -> 3: 10
//   between nodes    0 -> 5: 10    2 -> 7: 10
#pragma once

#include <cstdint>
#include <vector>

#include "layout/layout.h"
#include "layout/rank.h"

namespace shardwright {

struct Need {
  Rank rank{};
  int64_t elements = 0;  // above 0
};

struct Service {
  Rank from{};
  Rank to{};
  Interval range;  // of the receiver's elements
};

// Nodes are `ranks_per_node` consecutive ranks each. No rank is in both lists, and there is at least one holder. A
// holder serves at most `most_inside` elements within its node, which must be at least an even share of all that is
// needed. Returns at most one service for each pair of ranks.
std::vector<Service> share_by_nodes(std::vector<Rank> holders, std::vector<Need> needs, int64_t ranks_per_node,
                                    int64_t most_inside);

}  // namespace shardwright
