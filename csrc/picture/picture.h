// Draws a plan as a picture of the parts of ranks in each state, and of the messages of each step.
//
// On meshes of up to kMaxRanksDrawn ranks, each rank has a row: a box for each state, which shows the full tensor with
// the rank's part filled in the colors of the ranks that it was received from, and an arrow for each message. On larger
// meshes each mesh dim has a row with its placement in each state, at a cost that does not depend on the number of
// ranks. Plans between two meshes are drawn by rank if both together have up to kMaxRanksDrawn ranks, otherwise in
// blocks of ranks, with one arrow for all messages from one block to another. A rearrangement on more ranks, or one
// that flattens dims on one side only, is drawn as the plan's text.
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
