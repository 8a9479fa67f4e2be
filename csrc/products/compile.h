// Compiles products to programs.
#pragma once

#include "products/matmul.h"
#include "program/program.h"

namespace shardwright {

// Returns the program of a rank. Throws UserError as check() in matmul.h does, and if the rank is not on the mesh.
Program compile(const Matmul& matmul, const Schedule& schedule, Rank rank);

// Return the program of a rank for one kind of Matmul. Unlike `compile`, they check nothing and leave
// Program::sms_left at 0. compile_gather calls compile_flagged for method 'flags'.
//
// A gather, rank 0 in a ring of 3 with depth 1. Chunk d is the part of the rank at distance d:
//
//   start chunk 1; multiply the own part; wait for chunk 1; start chunk 2; multiply chunk 1; wait for chunk 2; multiply
//   chunk 2
//
// A scatter, the same ring. Chunk d is the block of the result for the rank at distance d:
//
//   multiply block 1, start chunk 1; multiply block 2, start chunk 2; wait for chunk 1; multiply the own block; wait
//   for chunk 2; sum the own block and the received blocks in the order of positions
Program compile_gather(const GatherMatmul& matmul, const Schedule& schedule, Rank rank);
Program compile_flagged(const GatherMatmul& matmul, const Schedule& schedule, Rank rank);
Program compile_scatter(const MatmulScatter& matmul, const Schedule& schedule, Rank rank);

}  // namespace shardwright
