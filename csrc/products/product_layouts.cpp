#include "products/product_layouts.h"

#include <algorithm>

#include "support/error.h"

namespace shardwright {
namespace {

// Returns `given` if the two layouts are equal, else `derived`. Equal layouts may be written with different placements;
// this keeps the placements of `given`.
Layout reuse_if_equal(const Layout& given, Layout derived) { return given == derived ? given : std::move(derived); }

// Returns the shard order of a tensor whose i-th dim is the layout's dim dims[i].
ShardOrder order_of_dims(const Layout& layout, const std::vector<int>& dims) {
  ShardOrder order;
  for (size_t i = 0; i < dims.size(); ++i) {
    std::vector<int>& mesh_dims = order[static_cast<int64_t>(i)];
    for (const Cut& cut : layout.cuts(dims[i])) mesh_dims.push_back(cut.mesh_dim);
  }
  return order;
}

std::vector<int> all_dims(const Layout& layout) {
  std::vector<int> dims(layout.shape().size());
  for (size_t d = 0; d < dims.size(); ++d) dims[d] = static_cast<int>(d);
  return dims;
}

// Returns GradientLayouts::operand_out. `gradient` is GradientLayouts::operand.
Layout operand_gradient_out(const Layout& operand, const Layout& gradient) {
  const Layout reduced = without_sums(operand);
  std::vector<Placement> placements = reduced.placements();
  for (size_t d = 0; d < placements.size(); ++d) {
    const bool stays_pending = operand.placements()[d].is_replicate() && gradient.placements()[d].is_partial();
    if (stays_pending) placements[d] = Placement::partial(ReduceOp::kSum);
  }
  return with_placements(reduced, std::move(placements));
}

}  // namespace

AxisSizes sizes_of(const std::string& letters, const Layout& layout) {
  AxisSizes sizes;
  for (size_t d = 0; d < letters.size(); ++d) sizes[letters[d]] = layout.shape()[d];
  return sizes;
}

AxisLayouts::AxisLayouts(MeshPtr mesh, AxisCuts cuts, const Known& known)
    : mesh_(std::move(mesh)), cuts_(std::move(cuts)) {
  std::map<char, std::vector<int>> mesh_dims;
  for (size_t d = 0; d < cuts_.size(); ++d) {
    if (cuts_[d] != kNoAxis) mesh_dims[cuts_[d]].push_back(static_cast<int>(d));
  }
  for (const auto& [axis, dims] : mesh_dims) cut_axes_[axis] = cut_axis(axis, dims, known);
}

AxisLayouts::CutAxis AxisLayouts::cut_axis(char axis, const std::vector<int>& mesh_dims, const Known& known) {
  for (const auto& [letters, layout] : known) {
    const size_t dim = letters.find(axis);
    if (dim == std::string::npos) continue;
    const std::vector<Cut>& cuts = layout.cuts(static_cast<int>(dim));
    std::vector<int> order;
    for (const Cut& cut : cuts) order.push_back(cut.mesh_dim);
    if (!std::is_permutation(order.begin(), order.end(), mesh_dims.begin(), mesh_dims.end())) continue;
    CutAxis cut_like_known{layout.shape()[dim], cuts};
    const bool has_rules =
        std::any_of(cuts.begin(), cuts.end(), [](const Cut& c) { return !c.rule.is_strided_or_chunks(); });
    for (Cut& cut : cut_like_known.cuts) {
      if (!has_rules) cut.rule = CutRule();
    }
    return cut_like_known;
  }
  CutAxis cut_into_chunks;
  for (const int d : mesh_dims) cut_into_chunks.cuts.push_back({d, 1});
  return cut_into_chunks;
}

Layout AxisLayouts::layout(const std::string& letters, const AxisSizes& sizes, const DType& dtype,
                           const std::string& operands) const {
  std::vector<int64_t> shape;
  ShardOrder order;
  std::vector<Placement> placements;
  for (const char axis : cuts_) {
    const bool is_pending = letters.find(axis) == std::string::npos && operands.find(axis) != std::string::npos;
    placements.push_back(is_pending ? Placement::partial(ReduceOp::kSum) : Placement::replicate());
  }
  for (size_t t = 0; t < letters.size(); ++t) {
    shape.push_back(sizes.at(letters[t]));
    const auto found = cut_axes_.find(letters[t]);
    if (found == cut_axes_.end()) continue;
    const auto& [length, cuts] = found->second;
    for (const Cut& cut : cuts) {
      const CutRule rule = length == shape.back() ? cut.rule : CutRule();
      placements[cut.mesh_dim] = Placement::cut(static_cast<int64_t>(t), rule);
      order[static_cast<int64_t>(t)].push_back(cut.mesh_dim);
    }
  }
  return Layout(mesh_, std::move(shape), dtype, std::move(placements), order, StridedMeaning::kLiteral);
}

Layout with_placements(const Layout& layout, std::vector<Placement> placements) {
  return Layout(layout.mesh_ptr(), layout.tensor_shape(), layout.dtype(), std::move(placements),
                order_of_dims(layout, all_dims(layout)), StridedMeaning::kLiteral, layout.flattened());
}

Layout without_sums(const Layout& layout) {
  std::vector<Placement> placements = layout.placements();
  for (Placement& placement : placements) {
    if (placement.is_partial()) placement = Placement::replicate();
  }
  return with_placements(layout, std::move(placements));
}

Layout with_dims(const Layout& layout, const std::vector<int>& dims, const DType& dtype) {
  std::vector<int64_t> shape;
  for (const int d : dims) shape.push_back(layout.shape()[d]);
  std::vector<Placement> placements = layout.placements();
  for (Placement& placement : placements) {
    if (!placement.is_shard_like()) continue;
    const auto found = std::find(dims.begin(), dims.end(), placement.dim);
    if (found == dims.end()) {
      placement = Placement::replicate();
    } else {
      placement.dim = found - dims.begin();
    }
  }
  return Layout(layout.mesh_ptr(), std::move(shape), dtype, std::move(placements), order_of_dims(layout, dims),
                StridedMeaning::kLiteral);
}

AxisCuts cuts_in_place(const std::string& axes, const Layout& operand, const Layout& weight) {
  const AxisLetters letters = AxisLetters::parse(axes);
  const auto axis_at = [](const std::string& tensor_letters, const Placement& placement) {
    return placement.is_shard_like() ? tensor_letters.at(static_cast<size_t>(placement.dim)) : kNoAxis;
  };
  AxisCuts cuts;
  for (int d = 0; d < operand.mesh().ndim(); ++d) {
    const char operand_axis = axis_at(letters.operand, operand.placements()[d]);
    const char weight_axis = axis_at(letters.weight, weight.placements()[d]);
    const auto is_summed = [&](char axis) { return axis != kNoAxis && letters.result.find(axis) == std::string::npos; };
    if (weight_axis != kNoAxis && !is_summed(weight_axis)) {
      cuts.push_back(weight_axis);
    } else if (is_summed(weight_axis) && (operand_axis == weight_axis || operand_axis == kNoAxis)) {
      cuts.push_back(weight_axis);
    } else {
      cuts.push_back(is_summed(operand_axis) ? kNoAxis : operand_axis);
    }
  }
  return cuts;
}

std::vector<Placement> placements_in_place(const std::string& axes, const Layout& operand, const Layout& weight) {
  const AxisLetters letters = AxisLetters::parse(axes);
  AxisSizes sizes = sizes_of(letters.operand, operand);
  sizes.merge(sizes_of(letters.weight, weight));
  const AxisLayouts layouts(operand.mesh_ptr(), cuts_in_place(axes, operand, weight),
                            {{letters.operand, operand}, {letters.weight, weight}});
  return layouts.layout(letters.result, sizes, operand.dtype(), letters.operand + letters.weight).placements();
}

namespace {

// Returns ProductLayouts::gradients. `results` are ProductLayouts::results.
GradientLayouts lay_out_gradients(const ProductProblem& problem, const std::vector<AxisLetters>& letters,
                                  const AxisLayouts& layouts, const std::vector<Layout>& results) {
  const DType& dtype = problem.operand.dtype();
  std::string all_result_letters;
  for (const AxisLetters& product_letters : letters) all_result_letters += product_letters.result;
  const std::string& operand = letters[0].operand;
  Layout operand_gradient = layouts.layout(operand, sizes_of(operand, problem.operand), dtype, all_result_letters);
  Layout out = operand_gradient_out(problem.operand, operand_gradient);
  GradientLayouts gradients{std::move(operand_gradient), {}, {}, std::move(out)};
  for (size_t j = 0; j < letters.size(); ++j) {
    const AxisSizes sizes = sizes_of(letters[j].weight, problem.weights[j]);
    gradients.weights.push_back(layouts.layout(letters[j].weight, sizes, dtype, letters[j].result));
    gradients.results.push_back(without_sums(results[j]));
  }
  return gradients;
}

}  // namespace

ProductLayouts lay_out(const ProductProblem& problem, const AxisCuts& cuts) {
  std::vector<AxisLetters> letters;
  for (const std::string& axes : problem.axes) letters.push_back(AxisLetters::parse(axes));
  AxisLayouts::Known known{{letters[0].operand, problem.operand}};
  for (size_t j = 0; j < letters.size(); ++j) known.emplace_back(letters[j].weight, problem.weights[j]);
  const AxisLayouts layouts(problem.operand.mesh_ptr(), cuts, known);
  const auto during = [&](const std::string& tensor_letters, const Layout& layout) {
    return reuse_if_equal(layout, layouts.layout(tensor_letters, sizes_of(tensor_letters, layout), layout.dtype()));
  };
  ProductLayouts product_layouts{during(letters[0].operand, problem.operand), {}, {}};
  for (size_t j = 0; j < letters.size(); ++j) {
    const auto& [operand, weight, result] = letters[j];
    const Layout& result_layout = problem.results[j];
    product_layouts.weights.push_back(during(weight, problem.weights[j]));
    product_layouts.results.push_back(
        layouts.layout(result, sizes_of(result, result_layout), result_layout.dtype(), operand + weight));
  }
  if (problem.scaled_by == ScaledBy::kNothing) {
    product_layouts.gradients = lay_out_gradients(problem, letters, layouts, product_layouts.results);
  }
  return product_layouts;
}

}  // namespace shardwright
