// Whether a plan that comes from elsewhere is one: its steps lead from source to destination, and each is what it says.
#pragma once

#include "moves/plan.h"

namespace shardwright {

// More than any two layouts are apart.
constexpr size_t kMaxSteps = 30;

// Throws UserError naming the step that does not follow from the one before, that no one move of its name carries out,
// or that undoes a reduction which the destination still has pending.
void check_steps(const Plan& plan);

}  // namespace shardwright
