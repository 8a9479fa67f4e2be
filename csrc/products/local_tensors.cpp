#include "products/local_tensors.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "support/error.h"

namespace shardwright {
namespace {

// Returns the shape of an operand's row scales: the lengths of its free dims. `shape` is the operand's shape.
std::vector<int64_t> row_scales_shape(const Contraction& axes, const std::vector<int>& operand_axes,
                                      const std::vector<int64_t>& shape) {
  std::vector<int64_t> lengths;
  for (const int d : free_dims_of(axes, operand_axes)) lengths.push_back(shape[d]);
  return lengths;
}

// Returns the shape of the product of two local tensors.
std::vector<int64_t> shape_of_product(const Contraction& axes, const std::vector<int64_t>& lhs_shape,
                                      const std::vector<int64_t>& rhs_shape) {
  std::vector<int64_t> shape;
  for (const int axis : axes.out) {
    const bool is_in_lhs = has_axis(axes.lhs, axis);
    const std::vector<int>& operand_axes = is_in_lhs ? axes.lhs : axes.rhs;
    const auto dim = std::find(operand_axes.begin(), operand_axes.end(), axis) - operand_axes.begin();
    shape.push_back((is_in_lhs ? lhs_shape : rhs_shape)[dim]);
  }
  return shape;
}

void check_is_on_mesh(const Plan& plan, Rank rank) {
  const Mesh& mesh = plan.src.mesh();
  check_user(mesh.position_of(rank).has_value(), "rank must be on the mesh (", mesh, "), got ", rank);
}

}  // namespace

LocalTensors local_tensors(const GatherMatmul& matmul, Rank rank) {
  check_is_on_mesh(matmul.plan, rank);
  const Plan& plan = matmul.plan;
  const DType operand_dtype = plan.src.dtype();
  const std::vector<int64_t> gathered = plan.dst.local_shape_of_rank(rank);
  LocalTensors tensors;
  tensors.inputs.push_back({plan.src.local_shape_of_rank(rank), operand_dtype});
  std::vector<LocalTensor> biases;
  for (const GatherMatmul::Product& product : matmul.products) {
    const std::vector<int64_t> other = product.other.local_shape_of_rank(rank);
    const std::vector<int64_t> result = shape_of_product(product.axes, gathered, other);
    tensors.inputs.push_back({other, product.other.dtype()});
    if (product.has_bias) biases.push_back({{result.back()}, operand_dtype});
    tensors.outputs.push_back({result, matmul.scaling ? matmul.scaling->result : operand_dtype});
  }
  tensors.inputs.insert(tensors.inputs.end(), biases.begin(), biases.end());
  if (const auto& scaling = matmul.scaling) {
    const std::optional<Plan>& rows = scaling->plan;
    tensors.inputs.push_back({rows ? rows->src.local_shape_of_rank(rank) : std::vector<int64_t>{}, DType::kFloat32});
    for (const GatherMatmul::Product& product : matmul.products) {
      const std::vector<int64_t> other = product.other.local_shape_of_rank(rank);
      tensors.inputs.push_back(
          {scaling->by_row ? row_scales_shape(product.axes, product.axes.rhs, other) : std::vector<int64_t>{},
           DType::kFloat32});
    }
  }
  if (matmul.keeps_gathered) tensors.outputs.push_back({gathered, operand_dtype});
  return tensors;
}

LocalTensors local_tensors(const MatmulScatter& matmul, Rank rank) {
  check_is_on_mesh(matmul.plan, rank);
  const auto part = [&](const Layout& layout) { return LocalTensor{layout.local_shape_of_rank(rank), layout.dtype()}; };
  LocalTensors tensors;
  for (const MatmulScatter::Term& term : matmul.terms) {
    tensors.inputs.push_back(part(term.lhs));
    tensors.inputs.push_back(part(term.rhs));
  }
  if (matmul.has_addend) tensors.inputs.push_back(part(matmul.plan.src));
  if (const auto& scaling = matmul.scaling) {
    for (const MatmulScatter::Term& term : matmul.terms) {
      for (const auto& [dims, layout] : {std::pair(&term.axes.lhs, &term.lhs), std::pair(&term.axes.rhs, &term.rhs)}) {
        const std::vector<int64_t> shape = layout->local_shape_of_rank(rank);
        tensors.inputs.push_back(
            {scaling->by_row ? row_scales_shape(term.axes, *dims, shape) : std::vector<int64_t>{}, DType::kFloat32});
      }
    }
  }
  tensors.outputs.push_back(part(matmul.plan.dst));
  return tensors;
}

LocalTensors local_tensors(const Matmul& matmul, Rank rank) {
  return std::visit([&](const auto& alternative) { return local_tensors(alternative, rank); }, matmul);
}

std::vector<BufferId> declare_inputs(ProgramBuilder& builder, const LocalTensors& tensors) {
  std::vector<BufferId> declared;
  for (const LocalTensor& input : tensors.inputs) declared.push_back(builder.new_input(input.shape, input.dtype));
  return declared;
}

}  // namespace shardwright
