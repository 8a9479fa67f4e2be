// Pictures of plans: the parts of ranks in each state, and the messages of each step.
//
//   by rank       up to kMaxRanksDrawn ranks, of one mesh or two. A row per rank, with a box for each state and an
//                 arrow for each message. A box is the full tensor; the rank's part has the colors of its senders.
//   by mesh dim   more ranks, one mesh. A row per mesh dim, with its placement in each state. The cost does not depend
//                 on the number of ranks.
//   by block      more ranks, two meshes. Blocks of ranks, with an arrow for all messages from one block to another.
//   as text       rearrangements of more ranks, and rearrangements that flatten dims on one side only.
//
// Equal plans give equal documents, which load no other files and run no code.
#pragma once

#include <cstdint>
#include <string>

#include "moves/plan.h"

namespace shardwright {

constexpr int64_t kMaxRanksDrawn = 16;

// Returns a standalone SVG document. On hover, parts and arrows show their ranks, indices and number of bytes.
std::string to_svg(const Plan& plan);

}  // namespace shardwright
