// Draws a scheduled step: what is computed and transferred when, and what lies where in the arena meanwhile.
//
// With times, the horizontal axis is the predicted time (schedule/lanes.h); without, every use is equally wide and
// there is no lane of transfers. Equal schedules give equal text. The document loads no other files and runs no code.
#pragma once

#include <string>

#include "schedule/schedule.h"

namespace shardwright {

// Returns a standalone SVG document. A weight has one colour; reductions are striped. On hover, everything says what it
// is.
std::string to_svg(const StepSchedule& schedule);

}  // namespace shardwright
