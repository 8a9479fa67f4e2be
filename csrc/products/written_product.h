// A product as a user writes it on a command line, and the problem that it describes.
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
  std::vector<std::string> biases;   // by weight; empty: no biases
  std::vector<std::string> results;  // by weight; empty: where the product leaves them (placements_in_place)
};

// Returns the problem; the caller sets its schedule, its context and keeps_gathered. Throws UserError if the axes are
// invalid, an axis has no size, or placements do not match a tensor.
ProductProblem problem_of(const WrittenProduct& written);

}  // namespace shardwright
