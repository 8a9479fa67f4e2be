// The layouts of a product's tensors while it is computed, and the layouts of their gradients.
//
// Along each mesh dim, at most one axis is sharded while a product is computed: an axis of the operand, an axis of a
// weight, or a summed axis, which leaves a pending sum. For example, on the mesh (a, b), "mk,kn->mn" with the cuts "km"
// gives the operand [S(1), S(0)], the weight [S(0), R] and the result [P(sum), S(0)].
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

// Returns the sizes of a tensor whose dims are these letters.
AxisSizes sizes_of(const std::string& letters, const Layout& layout);

// Makes the layout of any tensor from its axes, for one choice of cuts.
class AxisLayouts {
 public:
  // The letters and layouts of tensors that already exist.
  using Known = std::vector<std::pair<std::string, Layout>>;

  // Decides how each axis in `cuts` is cut by the mesh dims that `cuts` has for it. The first tensor in `known` that is
  // sharded along the axis by exactly these mesh dims gives their order. It also gives the cut rules if one of its
  // rules is neither chunks nor strided; otherwise all cuts are chunks. Without such a tensor, the axis is cut into
  // chunks, in mesh order.
  AxisLayouts(MeshPtr mesh, AxisCuts cuts, const Known& known);

  // Returns the layout of a tensor whose dims are `letters`. For a result, `operands` has the letters of both operands:
  // each cut axis that is in `operands` but not in `letters` leaves a pending sum. `sizes` must have all `letters`.
  Layout layout(const std::string& letters, const AxisSizes& sizes, const DType& dtype,
                const std::string& operands = "") const;

 private:
  // The cuts of one axis. Their rules apply to axes of this length. One letter may have other lengths in other tensors;
  // these are cut into chunks.
  struct CutAxis {
    int64_t length = 0;
    std::vector<Cut> cuts;
  };
  // Returns the cuts of one axis by these mesh dims, as the constructor derives them.
  static CutAxis cut_axis(char axis, const std::vector<int>& mesh_dims, const Known& known);

  MeshPtr mesh_;
  AxisCuts cuts_;
  std::map<char, CutAxis> cut_axes_;
};

// Returns the layout with other placements, which must cut the same dims by the same mesh dims. The order of the cuts
// stays the same.
Layout with_placements(const Layout& layout, std::vector<Placement> placements);

// Returns the layout with R instead of pending reductions. Gradients are returned in such layouts.
Layout without_sums(const Layout& layout);

// Returns the layout of a tensor that has only these dims of `layout`, in the order of `dims`. It is sharded along them
// as `layout` is, and R along mesh dims that shard other dims. Pending reductions stay.
Layout with_dims(const Layout& layout, const std::vector<int>& dims, const DType& dtype);

// Chooses cuts that keep operand and weight where they are as far as possible. Along each mesh dim it takes the axis of
// the weight's cut if that axis is free, or if it is summed and the operand has the same cut there or none. Otherwise
// it takes the axis of the operand's cut if that axis is free, else none. For "mk,kn->mn" along one mesh dim:
//
//   operand, weight   cut         operand, weight   cut           operand, weight   cut
//   any, S(1)         n           S(1), S(0)        k             S(0), R           m
//   R, S(0)           k           S(0), S(0)        m             S(1), R           none
AxisCuts cuts_in_place(const std::string& axes, const Layout& operand, const Layout& weight);

// Returns the result's placements for the cuts of cuts_in_place(): along each mesh dim, sharded if a free axis is cut,
// P(sum) if a summed axis is cut, else R.
std::vector<Placement> placements_in_place(const std::string& axes, const Layout& operand, const Layout& weight);

// The layouts of gradients.
struct GradientLayouts {
  // The gradients of the operand and of each weight as products compute them. Sums are pending along mesh dims that cut
  // an axis that the operand or weight lacks.
  Layout operand;
  std::vector<Layout> weights;
  // The gradients of the results, as inputs of the backward's products.
  std::vector<Layout> results;
  // The operand's gradient as it is returned: sharded like the operand, except that sums stay pending where the operand
  // is R. The backward of the operation that made the operand can then reduce and cut in one step.
  Layout operand_out;
};

// The layouts of a product's tensors while it is computed.
struct ProductLayouts {
  Layout operand;
  std::vector<Layout> weights;
  std::vector<Layout> results;
  // Scaled products have no gradients.
  std::optional<GradientLayouts> gradients = std::nullopt;
};

// Returns the layouts while the product is computed with these cuts. `problem` must pass check().
ProductLayouts lay_out(const ProductProblem& problem, const AxisCuts& cuts);

}  // namespace shardwright
