#include "products/written_product.h"

#include "support/error.h"

namespace shardwright {

ProductProblem problem_of(const WrittenProduct& written) {
  const AxisLetters letters = AxisLetters::parse(written.axes);
  const auto layout = [&](const std::string& tensor_letters, std::vector<Placement> placements) {
    std::vector<int64_t> shape;
    for (const char axis : tensor_letters) {
      const auto found = written.sizes.find(axis);
      check_user(found != written.sizes.end(), "sizes must have one size for each axis of ", written.axes,
                 ", got none for '", axis, "'");
      shape.push_back(found->second);
    }
    return Layout(written.mesh, std::move(shape), written.dtype, std::move(placements));
  };
  ProductProblem problem{{}, layout(letters.operand, parse_placements(written.operand)), {}, {}, {}};
  for (const std::string& placements : written.weights) {
    const Layout& weight = problem.weights.emplace_back(layout(letters.weight, parse_placements(placements)));
    problem.axes.push_back(written.axes);
    if (written.biases.empty()) problem.biases.emplace_back();
    if (!written.results.empty()) continue;
    problem.results.push_back(layout(letters.result, placements_in_place(written.axes, problem.operand, weight)));
  }
  const std::string last = letters.result.empty() ? "" : letters.result.substr(letters.result.size() - 1);
  for (const std::string& placements : written.biases) {
    problem.biases.push_back(layout(last, parse_placements(placements)));
  }
  for (const std::string& placements : written.results) {
    problem.results.push_back(layout(letters.result, parse_placements(placements)));
  }
  return problem;
}

}  // namespace shardwright
