// Plans as text.
#pragma once

#include <string>

#include "moves/plan.h"

namespace shardwright {

// Returns a line for the plan, then one for each step.
std::string to_string(const Plan& plan);

}  // namespace shardwright
