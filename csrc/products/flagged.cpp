// Checks if the product of a GatherMatmul can wait for flags, and compiles the program.
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "products/compile.h"
#include "products/local_tensors.h"
#include "program/builder.h"
#include "support/error.h"

namespace shardwright {
namespace {

// The sizes of a matrix product: (rows x summed) times (summed x columns).
struct MatrixSizes {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t summed = 0;
  bool is_rhs_row_major = false;  // true: the second factor is stored (summed, columns); false: (columns, summed)
};

std::vector<int> concatenated(std::vector<int> a, const std::vector<int>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Returns the product of a tensor's sizes along the given axes.
int64_t num_elements_along(const std::vector<int>& axes, const std::vector<int>& tensor_axes,
                           const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (size_t d = 0; d < tensor_axes.size(); ++d) product *= has_axis(axes, tensor_axes[d]) ? shape[d] : 1;
  return product;
}

// Returns the sizes of the matrix product that one rank's row-major tensors form. Returns nullopt if the order of their
// axes does not allow it: "bsk,nk->bsn" forms (bs x k) times (k x n), "sbk,nk->bsn" forms none.
std::optional<MatrixSizes> as_matrices(const Contraction& axes, const std::vector<int64_t>& lhs_shape,
                                       const std::vector<int64_t>& rhs_shape) {
  std::vector<int> summed;
  std::vector<int> rows;
  std::vector<int> columns;
  for (const int axis : axes.lhs) (axes.is_summed(axis) ? summed : rows).push_back(axis);
  for (const int axis : axes.rhs) {
    if (!axes.is_summed(axis)) columns.push_back(axis);
  }
  const bool is_rhs_row_major = axes.rhs == concatenated(summed, columns);
  if (axes.lhs != concatenated(rows, summed) || axes.out != concatenated(rows, columns)) return std::nullopt;
  if (!is_rhs_row_major && axes.rhs != concatenated(columns, summed)) return std::nullopt;
  return MatrixSizes{num_elements_along(rows, axes.lhs, lhs_shape), num_elements_along(columns, axes.rhs, rhs_shape),
                     num_elements_along(summed, axes.lhs, lhs_shape), is_rhs_row_major};
}

// Returns true if the parts of the members of a group, in the group's order, are consecutive ranges of equal length
// that together make up the part of `receiver` after the step. `group` and `receiver` are positions.
bool are_consecutive(const Step& step, const std::vector<int64_t>& group, int64_t receiver) {
  const Region needed = step.after.region(receiver);
  const int64_t part = num_elements(needed) / static_cast<int64_t>(group.size());
  for (size_t m = 0; m < group.size(); ++m) {
    const Selection shared(step.before.region(group[m]), needed);
    const bool is_piece = shared.count() == part && num_elements(step.before.region(group[m])) == part;
    if (!is_piece || shared.contiguous_in_receiver() != static_cast<int64_t>(m) * part) return false;
  }
  return true;
}

// Returns the reason why the sizes at a position do not allow a product with flags, or nullopt if they do.
std::optional<std::string> why_not_these_sizes(const GatherMatmul& matmul, int64_t position, int64_t shares) {
  const Step& step = matmul.plan.steps.back();
  const Mesh& mesh = matmul.plan.src.mesh();
  const std::vector<int64_t> group = mesh.group(position, step.mesh_dims);
  const GatherMatmul::Product& product = matmul.products[0];
  const auto matrices = as_matrices(product.axes, shape_of(step.after.region(position)),
                                    product.other.local_shape_of_rank(mesh.rank_at(Position{position})));
  if (!matrices) return concat("the axes of ", product.axes, " do not form row-major matrices");
  if (!are_consecutive(step, group, position)) {
    return std::string("the parts of the operand are uneven, or not consecutive in the gathered operand");
  }
  const int64_t rows = matrices->rows / static_cast<int64_t>(group.size());
  if (rows == 0 || rows % (shares * kRowsOfFlaggedChunks) != 0) {
    return concat("each part must have a positive multiple of ", shares, " x ", kRowsOfFlaggedChunks, " rows, got ",
                  rows);
  }
  const auto is_multiple = [](int64_t size) { return size > 0 && size % kUnitOfFlaggedRows == 0; };
  if (!is_multiple(matrices->columns)) {
    return concat("the number of columns must be a positive multiple of ", kUnitOfFlaggedRows, ", got ",
                  matrices->columns);
  }
  if (!is_multiple(matrices->summed)) {
    return concat("the length of the summed axis must be a positive multiple of ", kUnitOfFlaggedRows, ", got ",
                  matrices->summed);
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> why_no_flags(const Matmul& matmul, int64_t shares) {
  const auto* gather = std::get_if<GatherMatmul>(&matmul);
  if (gather == nullptr) return std::string("the product moves its result, not an operand");
  const Plan& plan = gather->plan;
  if (plan.steps.empty() || plan.steps.back().op != StepOp::kAllGather || why_only_serial(matmul)) {
    return std::string("the last step of the operand's plan is not a plain all_gather");
  }
  if (!plan.lowering.is_on_device)
    return concat("ranks of ", plan.lowering.name, " cannot copy from the memory of their peers");
  const GatherMatmul::Product& product = gather->products[0];
  if (gather->products.size() > 1) return std::string("the moved operand has several products");
  if (product.has_bias) return std::string("a bias is added");
  if (gather->scaling || plan.src.dtype() != DType::kBFloat16) {
    return concat("the operands are ", plan.src.dtype().name(), ", not bfloat16");
  }
  for (int64_t position = 0; position < plan.src.mesh().size(); ++position) {
    if (auto why = why_not_these_sizes(*gather, position, shares)) return why;
  }
  return std::nullopt;
}

// The program offers the rank's part to its peers, and starts the fetch and the product once all ranks have offered
// their parts. The product may occupy all multiprocessors; copies from peers and their flags need none.
Program compile_flagged(const GatherMatmul& matmul, const Schedule& schedule, Rank rank) {
  const Plan& plan = matmul.plan;
  const Step& step = plan.steps.back();
  const GatherMatmul::Product& product = matmul.products[0];
  ProgramBuilder b(plan.src.dtype(), plan.lowering, plan.named_groups_only, rank);
  const Position here = b.position_on(plan.src.mesh());
  const Region needed = step.after.region(here);
  const std::vector<int64_t> other_shape = product.other.local_shape_of_rank(rank);
  const auto sizes = as_matrices(product.axes, shape_of(needed), other_shape);
  check_invariant(sizes.has_value(), "the axes of a product with flags do not form matrices");
  const auto [rows, columns, summed, is_rhs_row_major] = *sizes;

  const LocalTensors tensors = local_tensors(matmul, rank);
  const BufferId other = declare_inputs(b, tensors)[1];
  const size_t last = plan.steps.size() - 1;
  const BufferId current = compile_steps(b, plan, 0, last, kInputBuffer);
  const int group = b.group_index(step);
  const int64_t chunks = static_cast<int64_t>(b.program().groups[group].ranks.size()) * schedule.chunks;
  b.begin_step(concat(step_text(plan, last), ", with a product that waits for ", chunks, " flags"));
  const BufferId gathered = b.new_buffer(num_elements(needed));
  const BufferId flags = b.new_buffer(chunks, DType::kUInt32);
  const BufferId out = b.new_buffer(rows * columns);

  const Ticket offer = b.emit(Offer{group, b.whole(current)});
  b.copy(current, gathered, Selection(step.before.region(here), needed).boxes(CopySide::local(), CopySide::local()));
  b.emit(FillZero{b.whole(flags)});
  b.wait(offer);
  const Ticket fetch = b.emit(Fetch{group, offer, b.whole(gathered), b.whole(flags)});
  Gemm gemm{{gathered, 0, summed, 1},
            {other, 0, is_rhs_row_major ? columns : 1, is_rhs_row_major ? 1 : summed},
            {out, 0, columns, 1},
            rows,
            columns,
            summed};
  gemm.flags = Flags{b.whole(flags), b.program().groups[group].index * schedule.chunks, fetch};
  b.emit(gemm);
  b.wait(fetch);

  b.add_output(out, tensors.outputs[0].shape);
  if (matmul.keeps_gathered) b.add_output(gathered, shape_of(needed));
  return std::move(b.program());
}

}  // namespace shardwright
