#include "products/product_problem.h"

#include <algorithm>

#include "support/error.h"

namespace shardwright {
namespace {

constexpr const char* kScaledByNames[] = {"", "tensor", "row"};

std::map<char, int64_t> sizes_of(const std::string& letters, const Layout& layout, const std::string& what) {
  check_user(letters.size() == layout.shape().size(), what, ": ", layout, " for the axes '", letters,
             "'; allowed is one dim for each");
  std::map<char, int64_t> sizes;
  for (size_t d = 0; d < letters.size(); ++d) sizes[letters[d]] = layout.shape()[d];
  return sizes;
}

void check_sizes(const ProductProblem& problem, size_t j, const AxisLetters& letters) {
  const std::string weight_name = concat("weights[", j, "]");
  std::map<char, int64_t> sizes = sizes_of(letters.weight, problem.weights[j], weight_name);
  for (const auto& [axis, size] : sizes_of(letters.operand, problem.operand, "operand")) {
    const auto [found, is_new] = sizes.emplace(axis, size);
    check_user(found->second == size, weight_name, ": the axis '", std::string(1, axis), "' has ", found->second,
               " elements, and ", size, " in the operand; allowed is one size");
  }
  const std::string result_name = concat("results[", j, "]");
  for (const auto& [axis, size] : sizes_of(letters.result, problem.results[j], result_name)) {
    check_user(sizes.at(axis) == size, result_name, ": the axis '", std::string(1, axis), "' has ", size,
               " elements; allowed are ", sizes.at(axis));
  }
  const std::optional<Layout>& bias = problem.biases[j];
  if (!bias) return;
  check_user(!letters.result.empty() && bias->ndim() == 1 && bias->shape()[0] == sizes.at(letters.result.back()),
             "biases[", j, "]: ", *bias, "; allowed is one dim, as the last of ", problem.results[j]);
}

void check_cuts(const ProductProblem& problem) {
  if (!problem.cuts) return;
  const int ndim = problem.operand.mesh().ndim();
  check_user(static_cast<int>(problem.cuts->size()) == ndim, "cuts: '", *problem.cuts, "' for a mesh of ", ndim,
             " dims; allowed is one axis per mesh dim, or '-'");
  for (const char axis : *problem.cuts) {
    check_user(axis == kNoAxis || (axis >= 'a' && problem.axes[0].find(axis) != std::string::npos), "cuts: '",
               *problem.cuts, "' for the product ", problem.axes[0], "; allowed are its axes, and '-' for none");
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
  for (const ScaledBy one : {ScaledBy::kNothing, ScaledBy::kTensor, ScaledBy::kRow}) {
    if (name == scaled_by_name(one)) return one;
  }
  throw UserError(concat("scaled_by: '", name, "'; allowed are 'tensor', 'row' and nothing"));
}

const GemmModel& ProductContext::gemm_model(const DType& dtype) const {
  const auto found = gemm_models.find(dtype.name());
  check_user(found != gemm_models.end(), "gemm_models: there is none for ", dtype.name());
  return found->second;
}

Topology ProductContext::known_topology() const {
  return topology ? *topology : Topology::named(lowering.default_topology);
}

void check(const ScheduleRequest& request) {
  check_user(!request.chunks || (*request.chunks >= 1 && *request.chunks <= kMaxChunks),
             "chunks: ", request.chunks.value_or(0), "; allowed are 1 to ", kMaxChunks,
             ", or the distances of each chunk of a ring");
  const int64_t most = request.method == Method::kSerial ? 1 : kMaxChunks;
  const std::string method = request.method ? concat("method '", method_name(*request.method), "'") : "any method";
  check_user(!request.depth || (*request.depth >= 1 && *request.depth <= most), "depth: ", request.depth.value_or(0),
             " with ", method, "; allowed are 1 to ", most);
}

void check(const ProductProblem& problem) {
  const size_t count = problem.weights.size();
  check_user(count >= 1, "weights: got none; allowed is one or more");
  check_user(problem.axes.size() == count && problem.biases.size() == count && problem.results.size() == count,
             "axes, biases, results: got ", problem.axes.size(), ", ", problem.biases.size(), " and ",
             problem.results.size(), " for ", count, " weights; allowed is one of each per weight");
  const std::string operand = AxisLetters::parse(problem.axes[0]).operand;
  std::vector<const Layout*> layouts;
  for (size_t j = 0; j < count; ++j) {
    const AxisLetters letters = AxisLetters::parse(problem.axes[j]);
    check_user(letters.operand == operand, "axes: '", problem.axes[j], "' and '", problem.axes[0],
               "' name the operand's axes differently");
    check_sizes(problem, j, letters);
    layouts.insert(layouts.end(), {&problem.weights[j], &problem.results[j]});
    if (problem.biases[j]) layouts.push_back(&*problem.biases[j]);
  }
  check_user(problem.scales.empty() || (problem.scaled_by == ScaledBy::kRow && problem.scales.size() == count + 1),
             "scales: got ", problem.scales.size(), " layouts; allowed are those of operand and weights, by row");
  for (const auto& scale : problem.scales) {
    if (scale) layouts.push_back(&*scale);
  }
  layouts.push_back(&problem.operand);
  for (const Layout* layout : layouts) {
    check_user(layout->is_partition() && layout->flattened() == 1, "placements: ", *layout,
               " in a matrix product; allowed are layouts of the tensor's own dims in which no element is repeated or "
               "out of order, so redistribute it to such a layout first");
    check_user(layout->mesh() == problem.operand.mesh(), "mesh: ", *layout, " and ", problem.operand,
               " lie on different meshes; allowed is one");
  }
  check_cuts(problem);
  check(problem.schedule);
}

}  // namespace shardwright
