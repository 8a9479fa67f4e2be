// Relays: ranks that send or receive on behalf of other ranks, so that no rank sends or receives very many messages.
//
//   from one rank to 2,048 as [S(0)]     the rank sends 2,048 messages
//   over 45 relays                       the rank sends 45, and each relay sends at most 45
//   over 6, 42 and 293 relays            no rank sends more than 6
//
// A relay stands for a block of the ranks of a layout. It is the first rank of the block, and holds the union of the
// parts of the block's ranks. The layout of relays is a layout like any other, so relays may have relays of their own.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// Returns the cut rule that gives the indices lists[c] to coordinate c of a mesh dim: chunks if possible, else runs of
// any lengths, else pieces. Each list must ascend, and the lists must be disjoint.
CutRule rule_of(const std::vector<std::vector<Interval>>& lists);

// Returns the number of ranks of a layout without partials that hold elements.
int64_t ranks_with_elements(const Layout& layout);

// Returns a layout on relays for a layout without partials, with blocks of about `ranks` ranks. Blocks are products of
// consecutive replicas and of consecutive parts of each tensor dim, both in the order of the mesh dims that they differ
// in. Ranks without elements are in no block. Replicas are combined first, so that a relay holds little:
//
//   [R, S(0)] on 4 x 8 ranks, in blocks of 2     relay=2, relay.1=8 as [R, S(0)]: blocks of 2 replicas of a part
//                             in blocks of 8     relay=4 as [S(0)]: blocks of 4 replicas of 2 parts; ranks 0, 2, 4, 6
//
// If `ranks_per_node` is above 0, all ranks of a block are on one node, which is `ranks_per_node` consecutive ranks.
// Returns nullopt if the tensor is empty, if there would be fewer than two blocks or as many as ranks with elements, or
// if the parts of a tensor dim that the relays cut have more than kMaxRelayRuns intervals together.
constexpr size_t kMaxRelayRuns = 1 << 16;
std::optional<Layout> relays_in_blocks(const Layout& layout, int64_t ranks, int64_t ranks_per_node = 0);

// Returns at most kMaxRelayLayouts layouts on about `wanted` relays each, possibly none. The first is that of
// relays_in_blocks(), if it has one. In each further layout, a block is the ranks that differ only in some mesh dims,
// which make the innermost cuts of their tensor dims or cut nothing; the relays have the other mesh dims and their
// cuts. Of these layouts, numbers of relays near `wanted` come first.
constexpr size_t kMaxRelayLayouts = 3;
std::vector<Layout> relays_of(const Layout& layout, int64_t wanted);

}  // namespace shardwright
