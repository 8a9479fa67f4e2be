// Draws a scheduled step: the lanes of compute and transfers, and the buffers in the arena over time.
//
// In a schedule with times, the horizontal axis is the predicted time (schedule/lanes.h). In a schedule without times,
// all uses have equal widths, and there is no lane of transfers. Equal schedules give equal documents, which load no
// other files and run no code.
#pragma once

#include <string>

#include "schedule/schedule.h"

namespace shardwright {

// Returns a standalone SVG document. A color marks a weight, stripes mark reductions. Each shape has a text on hover.
std::string to_svg(const StepSchedule& schedule);

}  // namespace shardwright
