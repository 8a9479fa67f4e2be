// Plans as text.
#pragma once

#include <string>

#include "moves/plan.h"
#include "moves/traffic.h"

namespace shardwright {

// Returns a line for the plan, then one for each step. The plan's traffic is that of its step if only one communicates;
// otherwise, and without it, that of each step is computed.
std::string to_string(const Plan& plan, const TrafficTotals* traffic = nullptr);

}  // namespace shardwright
