// Ranks that take over what others serve or need, so that nobody sends or receives very many messages.
//
//   from one rank to 2,048 as [S(0)]     the rank sends 2,048 messages
//   over 45 relays                       it sends 45, and each relay sends 45 or 46
//
// A relay stands for a block of a mesh. It is the first rank of the block and holds what the ranks of the block hold
// together, once.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// Returns layouts on meshes of relays for a layout without partials, those with about the wanted number of relays
// first, and at most kMostRelayLayouts:
//
//   - Blocks are the ranks that differ only in some mesh dims, which are the innermost cuts of their tensor dims or cut
//     nothing. The relays have the other mesh dims, and their cuts.
//   - If all ranks have different parts, of one tensor dim, blocks are also consecutive positions that hold something,
//     as many blocks as there are relays wanted. The mesh is called "relay". Parts of more than kMostRuns intervals
//     together are not listed.
constexpr size_t kMostRelayLayouts = 3;
constexpr size_t kMostRuns = 1 << 16;
std::vector<Layout> relays_of(const Layout& layout, int64_t wanted);

}  // namespace shardwright
