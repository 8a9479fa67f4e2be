// The layouts of a product's tensors while it is computed, and those of their gradients.
//
// A product cuts at most one axis along each mesh dim: an axis of the operand, an axis of a weight, or a summed axis,
// which leaves a pending sum. For example, on the mesh (a, b), "mk,kn->mn" with the cuts "km" gives the operand [S(1),
// S(0)], the weight [S(0), R] and the result [P, S(0)].
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "products/product_problem.h"

namespace shardwright {

// The number of elements along each axis.
using AxisSizes = std::map<char, int64_t>;

AxisSizes sizes_of(const std::string& letters, const Layout& layout);

// Makes the layout of any tensor from its axes, for one choice of cuts.
class AxisLayouts {
 public:
  // The mesh dims that cut an axis do so in the order of the first tensor in `known` that is sharded along this axis by
  // exactly these mesh dims, and by its rules if some of them are neither chunks nor strided. Without such a tensor
  // they cut into chunks, in mesh order.
  using Known = std::vector<std::pair<std::string, Layout>>;
  AxisLayouts(MeshPtr mesh, AxisCuts cuts, const Known& known);

  // Returns the layout of a tensor. For a result, `operands` has the axes of its operands: each cut axis that is among
  // them but not in the result leaves a pending sum.
  Layout layout(const std::string& letters, const AxisSizes& sizes, const DType& dtype,
                const std::string& operands = "") const;

 private:
  // The cuts of an axis of this length. Axes of one letter may differ in length between tensors; then other lengths are
  // cut into chunks.
  struct OfAxis {
    int64_t length = 0;
    std::vector<Cut> cuts;
  };
  static OfAxis of_axis(char axis, const std::vector<int>& mesh_dims, const Known& known);

  MeshPtr mesh_;
  AxisCuts cuts_;
  std::map<char, OfAxis> by_axis_;
};

// Replaces placements that do not cut; the cuts and their order stay the same.
Layout with_placements(const Layout& layout, std::vector<Placement> placements);

// Replaces pending reductions with R. Gradients are returned in such layouts.
Layout without_sums(const Layout& layout);

// Returns the layout of a tensor that has only these dims: sharded along them as `layout` is, and R where `layout` is
// sharded along other dims.
Layout with_dims(const Layout& layout, const std::vector<int>& dims, const DType& dtype);

// Chooses cuts that keep operand and weight where they are as far as possible. Along each mesh dim it takes the axis of
// the weight's cut if that axis is free, or if it is summed and the operand has the same cut there or none. Otherwise
// it takes the axis of the operand's cut if that axis is free, else none.
AxisCuts cuts_in_place(const std::string& axes, const Layout& operand, const Layout& weight);

// Returns the result's placements for the cuts of cuts_in_place(): the operand's or weight's shard where a free axis is
// cut, P(sum) where a summed axis is cut, else R.
std::vector<Placement> placements_in_place(const std::string& axes, const Layout& operand, const Layout& weight);

// The layouts of gradients.
struct GradientLayouts {
  // The gradients as products compute them. Sums are pending along mesh dims that cut an axis which the operand, or the
  // weight, lacks.
  Layout operand;
  std::vector<Layout> weights;
  // The gradients of the results, as the products of the backward take them.
  std::vector<Layout> results;
  // The operand's gradient as it is returned: placed like the operand, except that sums stay pending where the operand
  // is R. The producer of the operand can then reduce and cut in one step.
  Layout operand_out;
};

// The layouts while a product computes with given cuts.
struct ProductLayouts {
  Layout operand;
  std::vector<Layout> weights;
  std::vector<Layout> results;
  // Scaled products have no gradients.
  std::optional<GradientLayouts> gradients = std::nullopt;
};

ProductLayouts lay_out(const ProductProblem& problem, const AxisCuts& cuts);

}  // namespace shardwright
