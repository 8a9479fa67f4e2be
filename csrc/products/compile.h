// From products to programs.
#pragma once

#include <cstdint>

#include "products/matmul.h"
#include "program/program.h"

namespace shardwright {

// The program of the rank at `position`. Throws as check() does, and UserError on a position that the mesh lacks.
Program compile(const Matmul& matmul, const Schedule& schedule, int64_t position);

// The two compilers behind it.
Program compile_gather(const GatherMatmul& matmul, const Schedule& schedule, int64_t position);
Program compile_scatter(const MatmulScatter& matmul, const Schedule& schedule, int64_t position);

}  // namespace shardwright
