// The two compilers behind compile(Matmul).
#pragma once

#include <cstdint>
#include <string>

#include "overlap/matmul.h"
#include "program/program.h"

namespace shardwright {

Program compile_gather(const GatherMatmul& matmul, const Schedule& schedule, int64_t position);
Program compile_scatter(const MatmulScatter& matmul, const Schedule& schedule, int64_t position);

// How messages name a step of a plan.
std::string step_text(const Plan& plan, size_t index);

}  // namespace shardwright
