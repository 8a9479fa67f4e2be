// Ranks that take over what others serve or need, so that nobody sends or receives very many messages.
//
//   from one rank to 2,048 as [S(0)]     the rank sends 2,048 messages
//   over 45 relays                       it sends 45, and each relay sends 45 or 46
//   over 6, 42 and 293 relays            nobody sends more than 6
//
// A relay stands for a block of a mesh. It is the first rank of the block and holds what the ranks of the block hold
// together, once. Relays have relays of their own: their layout is a layout like any other.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// Returns the rule by which coordinates get these lists, which ascend and share nothing: chunks, runs of any lengths,
// or pieces.
CutRule rule_of(const std::vector<std::vector<Interval>>& lists);

// Returns how many ranks of a layout without partials hold something.
int64_t ranks_with_elements(const Layout& layout);

// Returns a layout on relays of about `ranks` ranks each for a layout without partials. Blocks are products of
// consecutive replicas and of consecutive parts of each tensor dim, both in the order of the mesh dims that they differ
// in; ranks that hold nothing are in none. Replicas come first, so that a relay holds little:
//
//   [R, S(0)] on 4 x 8 ranks, in blocks of 2     relay=2, relay.1=8 as [R, S(0)]
//                             in blocks of 8     relay=4 as [S(0)], relays of 4 replicas and 2 of the 8 parts
//
// If `ranks_per_node` is above 0, a block has ranks of one node only, which is so many consecutive ranks. Returns
// nullopt if there would be fewer than two blocks or as many as ranks, or if the parts of a tensor dim that is cut are
// more than kMostRuns intervals together.
constexpr size_t kMostRuns = 1 << 16;
std::optional<Layout> relays_in_blocks(const Layout& layout, int64_t ranks, int64_t ranks_per_node = 0);

// Returns layouts on about the wanted number of relays, at most kMostRelayLayouts: relays in blocks, then those whose
// blocks are the ranks that differ only in some mesh dims, which are the innermost cuts of their tensor dims or cut
// nothing. These relays have the other mesh dims, and their cuts; those with about the wanted number come first.
constexpr size_t kMostRelayLayouts = 3;
std::vector<Layout> relays_of(const Layout& layout, int64_t wanted);

}  // namespace shardwright
