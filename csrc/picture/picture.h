// Draws a plan as a picture: who holds what before, who sends what to whom, who holds what afterwards.
//
// On meshes of up to kMaxRanksDrawn ranks, each rank has a row. It has a box for each state, which is the whole tensor
// with the rank's part filled in the colours of the ranks that it came from, and an arrow for each message. On larger
// meshes each mesh dim has a row with its placement in each state; such a picture costs the same for any number of
// ranks. Plans from one mesh to another are drawn alike if both together have up to kMaxRanksDrawn ranks, and in blocks
// of ranks, with an arrow for all messages from one block to another, if they have more. A
// rearrangement on more ranks, or one that flattens dims on one side only, is drawn as the plan's text.
//
// Equal plans give equal text. The document loads no other files and runs no code.
#pragma once

#include <cstdint>
#include <string>

#include "moves/plan.h"

namespace shardwright {

constexpr int64_t kMaxRanksDrawn = 16;

// Returns a standalone SVG document. On hover, parts and arrows show their ranks, indices and number of bytes.
std::string to_svg(const Plan& plan);

// Returns an HTML page that is also well-formed XML: the picture, and the plan as text.
std::string to_html(const Plan& plan);

}  // namespace shardwright
