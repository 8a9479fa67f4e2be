// Where the tensors of a product lie while it is computed, and where their gradients do.
//
// A product cuts at most one axis along each mesh dim: one of the operand, of a weight, or a summed one, whose sums are
// then due. Mesh (a, b), "mk,kn->mn" with the cuts "km": the operand lies [S(1), S(0)], the weight [S(0), R], the
// result [P, S(0)].
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "products/product_problem.h"

namespace shardwright {

// The elements of each axis.
using AxisSizes = std::map<char, int64_t>;

AxisSizes sizes_of(const std::string& letters, const Layout& layout);

// Layouts of tensors by their axes, under one choice of cuts.
class AxisLayouts {
 public:
  // Where several mesh dims cut an axis, the first cut is the one of the first tensor of `known` that they all cut in
  // this axis; else they cut in mesh order.
  using Known = std::vector<std::pair<std::string, Layout>>;
  AxisLayouts(MeshPtr mesh, AxisCuts cuts, const Known& known);

  // Of a result, with the axes of its `operands`: along those that it lacks sums are due.
  Layout layout(const std::string& letters, const AxisSizes& sizes, const DType& dtype,
                const std::string& operands = "") const;

 private:
  MeshPtr mesh_;
  AxisCuts cuts_;
  std::map<char, std::vector<int>> orders_;
};

// The same tensor, cut in the same order, with other placements where they do not cut.
Layout with_placements(const Layout& layout, std::vector<Placement> placements);

// The same with R where reductions are due: of a gradient.
Layout without_sums(const Layout& layout);

// Of a tensor that has only these dims: cut as this one along them, R where it is cut along others.
Layout with_dims(const Layout& layout, const std::vector<int>& dims, const DType& dtype);

// The cuts that operand and weight have already, or nearly: along each mesh dim an axis of the result that cuts the
// weight, a summed one that cuts the weight and may cut the operand too, else an axis of the operand alone.
AxisCuts cuts_in_place(const std::string& axes, const Layout& operand, const Layout& weight);

// Where the result of such cuts comes to lie by itself: cut along them, with sums due along summed axes.
std::vector<Placement> placements_in_place(const std::string& axes, const Layout& operand, const Layout& weight);

// Where gradients lie.
struct GradientLayouts {
  // As they come of products: of the operand, which lacks the axes that only weights have, and of weights.
  Layout operand;
  std::vector<Layout> weights;
  // Of the results, as products take them.
  std::vector<Layout> results;
  // Of what is given back for the operand: as the operand, but where that is R, sums stay due, so that whoever it came
  // from can reduce and cut at once.
  Layout operand_out;
};

// While a product computes under given cuts.
struct ProductLayouts {
  Layout operand;
  std::vector<Layout> weights;
  std::vector<Layout> results;
  // Scaled products have none.
  std::optional<GradientLayouts> gradients = std::nullopt;
};

ProductLayouts lay_out(const ProductProblem& problem, const AxisCuts& cuts);

}  // namespace shardwright
