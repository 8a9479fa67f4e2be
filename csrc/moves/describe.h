// Plans as text.
#pragma once

#include <string>

#include "moves/plan.h"
#include "moves/traffic.h"

namespace shardwright {

// Returns one line for the plan, one line per step and, for a plan in several segments, one line for the segments. For
// a plan without steps, the second line states that nothing has to move. The last line does not end with a newline.
// `traffic` is the traffic of the plan. If it is null or lacks `of_steps`, the traffic of each step is computed.
std::string to_string(const Plan& plan, const TrafficTotals* traffic = nullptr);

}  // namespace shardwright
