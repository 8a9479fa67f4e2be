// Tests the problem of a product that is written on a command line.
#include "products/written_product.h"

#include <gtest/gtest.h>

#include "products.h"

namespace shardwright {
namespace {

WrittenProduct a_linear() {
  return {.mesh = mesh_of({4}),
          .axes = "bsk,nk->bsn",
          .sizes = {{'b', 2}, {'s', 6}, {'k', 5}, {'n', 8}},
          .dtype = DType::kBFloat16,
          .operand = "S(1)",
          .weights = {"S(0)"},
          .biases = {},
          .results = {}};
}

TEST(WrittenProduct, HasTheShapesOfItsAxes) {
  WrittenProduct written = a_linear();
  written.biases = {"S(0)"};
  written.results = {"S(2)"};
  const ProductProblem problem = problem_of(written);
  const MeshPtr& mesh = written.mesh;
  EXPECT_EQ(problem.axes, std::vector<std::string>{"bsk,nk->bsn"});
  EXPECT_EQ(problem.operand, layout_on(mesh, {2, 6, 5}, {"S(1)"}, "bfloat16"));
  ASSERT_EQ(problem.weights.size(), 1U);
  EXPECT_EQ(problem.weights[0], layout_on(mesh, {8, 5}, {"S(0)"}, "bfloat16"));
  ASSERT_EQ(problem.biases.size(), 1U);
  EXPECT_EQ(problem.biases[0], layout_on(mesh, {8}, {"S(0)"}, "bfloat16"));
  ASSERT_EQ(problem.results.size(), 1U);
  EXPECT_EQ(problem.results[0], layout_on(mesh, {2, 6, 8}, {"S(2)"}, "bfloat16"));
}

TEST(WrittenProduct, DefaultsResultsAndOmitsBiases) {
  WrittenProduct written = a_linear();
  written.operand = "R";
  written.weights = {"S(0)", "S(1)"};
  const ProductProblem problem = problem_of(written);
  ASSERT_EQ(problem.results.size(), 2U);
  EXPECT_EQ(problem.results[0].placements(), parse_placements("S(2)"));
  EXPECT_EQ(problem.results[1].placements(), parse_placements("P"));
  ASSERT_EQ(problem.biases.size(), 2U);
  EXPECT_FALSE(problem.biases[0] || problem.biases[1]);
}

TEST(WrittenProduct, NamesAnAxisWithoutSize) {
  WrittenProduct written = a_linear();
  written.sizes.erase('n');
  try {
    problem_of(written);
    FAIL() << "no error";
  } catch (const UserError& error) {
    EXPECT_STREQ(error.what(), "sizes must have one size for each axis of bsk,nk->bsn, got none for 'n'");
  }
}

TEST(WrittenProduct, RejectsInvalidPlacements) {
  WrittenProduct written = a_linear();
  written.operand = "S(3)";
  EXPECT_THROW(problem_of(written), UserError);
  written = a_linear();
  written.weights = {"S(0),R"};
  EXPECT_THROW(problem_of(written), UserError);
}

}  // namespace
}  // namespace shardwright
