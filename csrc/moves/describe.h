// Plans as people read them.
#pragma once

#include <string>

#include "moves/plan.h"

namespace shardwright {

// A line for the plan, then one for each step.
std::string to_string(const Plan& plan);

}  // namespace shardwright
