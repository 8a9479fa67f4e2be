// Compiles products to programs.
#pragma once

#include "products/matmul.h"
#include "program/program.h"

namespace shardwright {

// Returns the program of a rank. Throws as check() does, and UserError if the rank is not on the mesh.
Program compile(const Matmul& matmul, const Schedule& schedule, Rank rank);

// Compile a product of each kind, without checks.
Program compile_gather(const GatherMatmul& matmul, const Schedule& schedule, Rank rank);
Program compile_flagged(const GatherMatmul& matmul, const Schedule& schedule, Rank rank);
Program compile_scatter(const MatmulScatter& matmul, const Schedule& schedule, Rank rank);

}  // namespace shardwright
