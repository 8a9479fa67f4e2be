// Plans as text.
#pragma once

#include <string>

#include "moves/plan.h"
#include "moves/traffic.h"

namespace shardwright {

// Returns one line for the plan, then one line per step, and one for segments. `traffic` is the plan's; if it is null
// or has no traffic of single steps, that is computed.
std::string to_string(const Plan& plan, const TrafficTotals* traffic = nullptr);

}  // namespace shardwright
