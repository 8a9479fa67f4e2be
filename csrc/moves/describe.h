// Plans as text.
#pragma once

#include <string>

#include "moves/plan.h"
#include "moves/traffic.h"

namespace shardwright {

// Returns one line for the plan, then one line per step, and one for segments. If `traffic` is null or lacks the steps'
// traffic, it is computed.
std::string to_string(const Plan& plan, const TrafficTotals* traffic = nullptr);

}  // namespace shardwright
