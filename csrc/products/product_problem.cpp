#include "products/product_problem.h"

#include <algorithm>

#include "support/error.h"

namespace shardwright {
namespace {

constexpr const char* kScaledByNames[] = {"", "tensor", "row"};

// Returns the sizes of a tensor by letter. Throws UserError, which names the tensor as `what`, unless `letters` has one
// letter for each dim.
std::map<char, int64_t> sizes_of(const std::string& letters, const Layout& layout, const std::string& what) {
  check_user(letters.size() == layout.shape().size(), what, " must have one dim for each axis of '", letters, "', got ",
             layout);
  std::map<char, int64_t> sizes;
  for (size_t d = 0; d < letters.size(); ++d) sizes[letters[d]] = layout.shape()[d];
  return sizes;
}

// Throws UserError unless the tensors of product j, its bias included, have equal sizes along common axes.
void check_sizes(const ProductProblem& problem, size_t j, const AxisLetters& letters) {
  const std::string weight_name = concat("weights[", j, "]");
  std::map<char, int64_t> sizes = sizes_of(letters.weight, problem.weights[j], weight_name);
  for (const auto& [axis, size] : sizes_of(letters.operand, problem.operand, "operand")) {
    const auto [entry, is_new] = sizes.emplace(axis, size);
    check_user(entry->second == size, weight_name, " must have ", size, " elements along axis '", axis,
               "', like the operand, got ", entry->second);
  }
  const std::string result_name = concat("results[", j, "]");
  for (const auto& [axis, size] : sizes_of(letters.result, problem.results[j], result_name)) {
    check_user(sizes.at(axis) == size, result_name, " must have ", sizes.at(axis), " elements along axis '", axis,
               "', got ", size);
  }
  const std::optional<Layout>& bias = problem.biases[j];
  if (!bias) return;
  check_user(!letters.result.empty() && bias->ndim() == 1 && bias->shape()[0] == sizes.at(letters.result.back()),
             "biases[", j, "] must have one dim, of the length of the last dim of ", problem.results[j], ", got ",
             *bias);
  for (const int d : problem.results[j].partial_dims().to_vector()) {
    const ReduceOp op = problem.results[j].placements()[d].op;
    const bool takes_bias =
        op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kMin || op == ReduceOp::kMax;
    check_argument(takes_bias, "placements", "without pending reductions other than sum, avg, min and max with a bias",
                   problem.results[j].placements_string());
  }
}

// Throws UserError unless the requested cuts, if any, are an axis of the first product or '-' for each mesh dim.
void check_cuts(const ProductProblem& problem) {
  if (!problem.cuts) return;
  const int ndim = problem.operand.mesh().ndim();
  check_user(static_cast<int>(problem.cuts->size()) == ndim, "cuts must have one axis, or '-', for each of ", ndim,
             " mesh dims, got '", *problem.cuts, "'");
  for (const char axis : *problem.cuts) {
    check_user(axis == kNoAxis || (axis >= 'a' && problem.axes[0].find(axis) != std::string::npos),
               "cuts must be axes of ", problem.axes[0], ", or '-' for none, got '", *problem.cuts, "'");
  }
}

}  // namespace

AxisLetters AxisLetters::parse(const std::string& axes) {
  Contraction::parse(axes);
  const size_t comma = axes.find(',');
  const size_t arrow = axes.find("->");
  return {axes.substr(0, comma), axes.substr(comma + 1, arrow - comma - 1), axes.substr(arrow + 2)};
}

const char* scaled_by_name(ScaledBy scaled_by) { return kScaledByNames[static_cast<int>(scaled_by)]; }

ScaledBy parse_scaled_by(const std::string& name) {
  for (const ScaledBy scaled_by : {ScaledBy::kNothing, ScaledBy::kTensor, ScaledBy::kRow}) {
    if (name == scaled_by_name(scaled_by)) return scaled_by;
  }
  throw UserError(concat("scaled_by must be 'tensor', 'row' or empty, got '", name, "'"));
}

const GemmModel& ProductContext::gemm_model(const DType& dtype) const {
  const auto found = gemm_models.find(dtype.name());
  check_user(found != gemm_models.end(), "gemm_models must have a model for ", dtype.name(), ", got none");
  return found->second;
}

Topology ProductContext::known_topology() const {
  return topology ? *topology : Topology::named(lowering.default_topology);
}

void check(const ScheduleRequest& request) {
  check_user(!request.chunks || (*request.chunks >= 1 && *request.chunks <= kMaxChunks), "chunks must be in [1, ",
             kMaxChunks, "], or for method 'ring' the distances of each chunk, got ", request.chunks.value_or(0));
  const bool is_serial = request.method == Method::kSerial;
  const int64_t most = is_serial ? 1 : kMaxChunks;
  check_user(!request.depth || (*request.depth >= 1 && *request.depth <= most), "depth must be ", InRange{1, most},
             is_serial ? " for method 'serial'" : "", ", got ", request.depth.value_or(0));
}

void check(const ProductProblem& problem) {
  const size_t count = problem.weights.size();
  check_argument(count >= 1, "weights", "a list of at least one weight", "none");
  check_user(problem.axes.size() == count && problem.biases.size() == count && problem.results.size() == count,
             "axes, biases and results must have one entry for each of ", count, " weights, got ", problem.axes.size(),
             ", ", problem.biases.size(), " and ", problem.results.size());
  const std::string operand = AxisLetters::parse(problem.axes[0]).operand;
  std::vector<const Layout*> layouts;
  for (size_t j = 0; j < count; ++j) {
    const AxisLetters letters = AxisLetters::parse(problem.axes[j]);
    check_user(letters.operand == operand, "axes must have the same letters for the operand, got '", problem.axes[j],
               "' and '", problem.axes[0], "'");
    check_sizes(problem, j, letters);
    layouts.insert(layouts.end(), {&problem.weights[j], &problem.results[j]});
    if (problem.biases[j]) layouts.push_back(&*problem.biases[j]);
  }
  check_user(problem.scales.empty() || problem.scaled_by == ScaledBy::kRow,
             "scales must be empty unless scaled_by is 'row', got ", problem.scales.size(), " for scaled_by '",
             scaled_by_name(problem.scaled_by), "'");
  check_user(problem.scales.empty() || problem.scales.size() == count + 1,
             "scales must be empty, or have one layout for the operand and one for each of ", count, " weights, got ",
             problem.scales.size());
  for (const auto& scale : problem.scales) {
    if (scale) layouts.push_back(&*scale);
  }
  layouts.push_back(&problem.operand);
  for (const Layout* layout : layouts) {
    check_user(layout->flattened() == 1, "placements must not flatten dims in a matrix product, got ", *layout,
               ". First redistribute the tensor to a layout without flattened dims");
    check_user(layout->is_partition(), "placements must not repeat or reorder elements in a matrix product, got ",
               *layout, ". First redistribute the tensor, for example to Replicate()");
    check_argument(layout->mesh() == problem.operand.mesh(), "mesh", "the same for all tensors", *layout, " and ",
                   problem.operand);
  }
  check_cuts(problem);
  check(problem.schedule);
}

}  // namespace shardwright
