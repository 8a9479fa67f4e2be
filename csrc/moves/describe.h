// Plans as text.
#pragma once

#include <string>

#include "moves/plan.h"
#include "moves/traffic.h"

namespace shardwright {

// Returns a line for the plan, then one for each step. What the plan's traffic does not say of a step is computed.
std::string to_string(const Plan& plan, const TrafficTotals* traffic = nullptr);

}  // namespace shardwright
