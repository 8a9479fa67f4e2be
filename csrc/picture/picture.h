// A plan as a picture: who holds what before, who sends what to whom, who holds what after.
//
// On meshes of up to kMaxRanksDrawn ranks each rank has a row, with a box per state that is the whole tensor, the part
// it holds filled in the colours of the ranks that it came from, and an arrow per message. On larger meshes each mesh
// dim has a row, with its placement per state; such a picture costs the same for any number of ranks.
//
// Equal plans give equal text. Nothing is loaded from elsewhere, and nothing runs.
#pragma once

#include <cstdint>
#include <string>

#include "moves/plan.h"

namespace shardwright {

constexpr int64_t kMaxRanksDrawn = 16;

// A standalone SVG document. Parts and arrows say on hover whose they are, which indices and how many bytes.
std::string to_svg(const Plan& plan);

// A page for the browser, well-formed as XML too: the picture, and the plan in words.
std::string to_html(const Plan& plan);

}  // namespace shardwright
