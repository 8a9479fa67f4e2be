// Draws a scheduled step: the lanes of compute and transfers, and the buffers in the arena over time.
//
// With times, the horizontal axis is the predicted time (schedule/lanes.h). Without, every use is equally wide and
// there is no lane of transfers. Equal schedules give equal documents, which load no other files and run no code.
#pragma once

#include <string>

#include "schedule/schedule.h"

namespace shardwright {

// Returns a standalone SVG document. Weights have colors, reductions stripes, and all shapes a description on hover.
std::string to_svg(const StepSchedule& schedule);

}  // namespace shardwright
