// Compiles products to programs.
#pragma once

#include <cstdint>

#include "products/matmul.h"
#include "program/program.h"

namespace shardwright {

// Returns the program of the rank at `position`. Throws as check() does, and UserError if the mesh has no such
// position.
Program compile(const Matmul& matmul, const Schedule& schedule, int64_t position);

// Compile one kind of product each, without checks.
Program compile_gather(const GatherMatmul& matmul, const Schedule& schedule, int64_t position);
Program compile_scatter(const MatmulScatter& matmul, const Schedule& schedule, int64_t position);

}  // namespace shardwright
