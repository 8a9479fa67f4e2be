// The two compilers behind compile(Matmul).
#pragma once

#include <cstdint>

#include "overlap/matmul.h"
#include "program/program.h"

namespace shardwright {

Program compile_gather(const GatherMatmul& matmul, const Schedule& schedule, int64_t position);
Program compile_scatter(const MatmulScatter& matmul, const Schedule& schedule, int64_t position);

}  // namespace shardwright
