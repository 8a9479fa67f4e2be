// A product as a command line gives it: axes with their sizes, and where each tensor is placed.
#pragma once

#include <string>
#include <vector>

#include "products/product_layouts.h"

namespace shardwright {

struct WrittenProduct {
  MeshPtr mesh;
  std::string axes;  // as in einsum: "bsk,nk->bsn"
  AxisSizes sizes;
  DType dtype = DType::kFloat32;
  // Placements, one per mesh dim: "S(0),R". There may be several weights, all with the same axes.
  std::string operand;
  std::vector<std::string> weights;
  std::vector<std::string> biases;   // by weight; or none, where no weight has one
  std::vector<std::string> results;  // by weight; or none, which asks for those that need no move of the result
};

// Returns the problem, without its schedule, its context and what it keeps. Throws UserError if an axis has no size, or
// if placements do not fit a tensor.
ProductProblem problem_of(const WrittenProduct& written);

}  // namespace shardwright
