#include "products/product_arguments.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "planning/serialize.h"
#include "products.h"
#include "products/product_plan.h"
#include "support/error.h"

namespace shardwright {
namespace {

GivenTensor plain(const std::string& name, std::vector<int64_t> shape, DType dtype = DType::kFloat32) {
  return {name, std::move(shape), dtype, "cpu"};
}

GivenTensor placed(const std::string& name, const Layout& layout) {
  return {name, layout.shape(), layout.dtype(), "cpu", layout};
}

// Rank 1 of 2 has x (3, 4) of (6, 4), and a weight (4, 5) of (4, 10).
ProductArguments gather() {
  return {.function = ProductFunction::kGather,
          .x = plain("x", {3, 4}),
          .weights = {plain("weights[0]", {4, 5})},
          .biases = {std::nullopt},
          .dim = 0,
          .size = 6,
          .columns = {10},
          .rank = 1,
          .num_ranks = 2};
}

ProductArguments linear() {
  const MeshPtr mesh = mesh_of({2});
  return {.function = ProductFunction::kLinear,
          .x = placed("x", layout_on(mesh, {3, 4}, {"S(0)"})),
          .weights = {placed("weight", layout_on(mesh, {5, 4}, {"S(0)"}))},
          .biases = {std::nullopt},
          .num_ranks = 2};
}

TEST(ProductArguments, OfPlainTensorsHaveTheCutsOfTheFunction) {
  const MeshPtr group = std::make_shared<Mesh>(std::vector<std::string>{"group"}, std::vector<int64_t>{2});
  ProductArguments arguments = gather();
  arguments.biases = {plain("biases[0]", {5})};
  const ProductProblem gathered = problem_of(arguments);
  EXPECT_EQ(gathered.axes, std::vector<std::string>{"ak,kn->an"});
  EXPECT_EQ(gathered.operand, layout_on(group, {6, 4}, {"S(0)"}));
  EXPECT_EQ(gathered.weights[0], layout_on(group, {4, 10}, {"S(1)"}));
  EXPECT_EQ(gathered.results[0], layout_on(group, {6, 10}, {"S(1)"}));
  EXPECT_EQ(*gathered.biases[0], layout_on(group, {10}, {"S(0)"}));
  EXPECT_EQ(gathered.cuts, "n");

  arguments.weights[0].is_transposed = true;
  EXPECT_EQ(problem_of(arguments).axes[0], "ak,nk->an");
  EXPECT_EQ(problem_of(arguments).weights[0], layout_on(group, {10, 4}, {"S(0)"}));

  // k is cut: rank 1 has 3 of 7 elements.
  arguments = gather();
  arguments.x = plain("x", {2, 3});
  arguments.weights = {plain("weights[0]", {7, 5})};
  arguments.dim = -1;
  arguments.size = 7;
  EXPECT_EQ(problem_of(arguments).operand, layout_on(group, {2, 7}, {"S(1)"}));
  EXPECT_EQ(problem_of(arguments).results[0], layout_on(group, {2, 10}, {"S(1)"}));

  arguments = {.function = ProductFunction::kSum,
               .x = plain("x", {2, 6, 3}),
               .weights = {plain("weight", {3, 5})},
               .biases = {plain("bias", {5})},
               .dim = 1,
               .size = 7,
               .rank = 1,
               .num_ranks = 2};
  const ProductProblem summed = problem_of(arguments);
  EXPECT_EQ(summed.axes[0], "abk,kn->abn");
  EXPECT_EQ(summed.operand, layout_on(group, {2, 6, 7}, {"S(2)"}));
  EXPECT_EQ(summed.weights[0], layout_on(group, {7, 5}, {"S(0)"}));
  EXPECT_EQ(summed.results[0], layout_on(group, {2, 6, 5}, {"S(1)"}));
  EXPECT_EQ(*summed.biases[0], layout_on(group, {5}, {"R"}));
  EXPECT_EQ(summed.cuts, "k");
  arguments.dim.reset();
  EXPECT_EQ(problem_of(arguments).results[0], layout_on(group, {2, 6, 5}, {"R"}));
}

TEST(ProductArguments, OfDTensorsKeepTheirLayouts) {
  const MeshPtr mesh = mesh_of({2, 2});
  ProductArguments arguments = linear();
  arguments.x = placed("x", layout_on(mesh, {6, 4}, {"S(0)", "S(1)"}));
  arguments.weights = {placed("weight", layout_on(mesh, {8, 4}, {"R", "S(1)"}))};
  arguments.biases = {placed("bias", layout_on(mesh, {8}, {"S(0)", "R"}))};
  const ProductProblem in_place = problem_of(arguments);
  EXPECT_EQ(in_place.axes[0], "ak,nk->an");
  EXPECT_EQ(in_place.results[0], layout_on(mesh, {6, 8}, {"S(0)", "P"}));
  EXPECT_EQ(*in_place.biases[0], *arguments.biases[0]->layout);
  EXPECT_FALSE(in_place.cuts.has_value());
  arguments.placements = {Placement::replicate(), Placement::shard(1)};
  EXPECT_EQ(problem_of(arguments).results[0], layout_on(mesh, {6, 8}, {"R", "S(1)"}));

  arguments.function = ProductFunction::kSum;
  arguments.placements.reset();
  arguments.weights = {placed("weight", layout_on(mesh, {4, 8}, {"R", "S(0)"}))};
  EXPECT_EQ(problem_of(arguments).results[0], layout_on(mesh, {6, 8}, {"S(0)", "R"}));
  EXPECT_EQ(problem_of(arguments).cuts, "ak");
  arguments.dim = 1;
  EXPECT_EQ(problem_of(arguments).results[0], layout_on(mesh, {6, 8}, {"S(0)", "S(1)"}));
}

TEST(ProductArguments, OfScaledOperandsHaveScalesPerRowOrPerTensor) {
  const MeshPtr mesh = mesh_of({2});
  ProductArguments arguments = linear();
  arguments.x = placed("x", layout_on(mesh, {3, 4}, {"S(0)"}, "float8_e4m3fn"));
  arguments.weights = {placed("weight", layout_on(mesh, {5, 4}, {"S(0)"}, "float8_e5m2"))};
  arguments.scales = {plain("x_scale", {}), plain("weight_scale", {1})};
  EXPECT_EQ(problem_of(arguments).scaled_by, ScaledBy::kTensor);
  EXPECT_EQ(problem_of(arguments).results[0].dtype(), DType::kBFloat16);
  EXPECT_TRUE(problem_of(arguments).scales.empty());
  arguments.out_dtype = DType::kFloat32;
  arguments.scales[1] = placed("weight_scale", layout_on(mesh, {5, 1}, {"S(0)"}));
  const ProductProblem by_row = problem_of(arguments);
  EXPECT_EQ(by_row.scaled_by, ScaledBy::kRow);
  EXPECT_EQ(by_row.results[0].dtype(), DType::kFloat32);
  EXPECT_FALSE(by_row.scales[0].has_value());
  EXPECT_EQ(*by_row.scales[1], layout_on(mesh, {5}, {"S(0)"}));
}

// Parts have the sizes of torch.chunk. Any other number of rows is an error, except in debug modes that compare all
// ranks.
TEST(ProductArguments, OfPlainTensorsMustHaveTheSizesOfTorchChunk) {
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    for (int64_t rows = 0; rows <= 9; ++rows) {
      int64_t begin = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const int64_t mine = std::min((rows + ranks - 1) / ranks, rows - begin);
        begin += mine;
        for (int64_t given = 0; given <= rows; ++given) {
          ProductArguments arguments = gather();
          arguments.x.shape[0] = given;
          arguments.size = rows;
          arguments.weights[0].shape[1] = 1;
          arguments.columns = {ranks};
          arguments.rank = rank;
          arguments.num_ranks = ranks;
          arguments.checks_parts = given % 2 == 0;
          if (given == mine || !arguments.checks_parts) {
            EXPECT_EQ(problem_of(arguments).operand.shape()[0], rows);
          } else {
            EXPECT_THROW(problem_of(arguments), UserError) << rows << " rows, " << given << " on rank " << rank;
          }
        }
      }
    }
  }
}

// linear.weight is (n, k) and contiguous; its transpose is (k, n) with these strides.
TEST(ProductArguments, StridesDecideWhetherTheyAreTransposed) {
  for (int64_t k = 0; k <= 3; ++k) {
    for (int64_t n = 0; n <= 3; ++n) {
      EXPECT_EQ(is_transposed({k, n}, {1, std::max<int64_t>(k, 1)}), k > 1) << k << " " << n;
    }
  }
  EXPECT_FALSE(is_transposed({3, 2}, {2, 1}));  // contiguous
  EXPECT_FALSE(is_transposed({3, 2}, {1, 4}));  // part of a wider matrix
  EXPECT_FALSE(is_transposed({3}, {1}));
}

// Returns everything that ranks must agree on, node by node: schedules, moves, operands.
std::vector<std::string> agreed(const Dataflow& flow) {
  std::vector<std::string> all;
  for (const Node& node : flow.nodes) {
    all.push_back(kind_name(node.operation));
    if (const auto* move = std::get_if<MoveNode>(&node.operation)) all.push_back(to_bytes(move->plan));
    const auto* product = std::get_if<MatmulNode>(&node.operation);
    if (product == nullptr) continue;
    all.push_back(concat(method_name(product->schedule.method), " ", chunks_text(product->schedule)));
    all.push_back(operands_text(product->matmul));
    for (const Plan* plan : plans_of(product->matmul)) all.push_back(plan->steps.empty() ? "" : to_bytes(*plan));
  }
  return all;
}

// The same for x (..., k) and a weight (k, n) on rank 0; the total length of k is `k`.
std::vector<std::string> agreed(ProductFunction function, std::vector<int64_t> rows, int64_t k, int64_t n,
                                std::optional<int64_t> dim, int64_t ranks, bool is_transposed) {
  const bool is_gather = function == ProductFunction::kGather;
  rows.push_back(k);
  ProductArguments arguments{.function = function,
                             .x = plain("x", rows),
                             .weights = {plain("weight", {k, n})},
                             .biases = {plain("bias", {n})}};
  arguments.weights[0].is_transposed = is_transposed;
  arguments.dim = dim;
  arguments.size = rows[is_gather ? *dim : rows.size() - 1];
  arguments.columns = {n};
  arguments.num_ranks = ranks;
  const auto chunk = [&](int64_t size) { return (size + ranks - 1) / ranks; };
  int64_t& cut = arguments.x.shape[is_gather ? *dim : rows.size() - 1];
  cut = chunk(cut);
  int64_t& cut_of_weight = arguments.weights[0].shape[is_gather ? 1 : 0];
  cut_of_weight = chunk(cut_of_weight);
  if (is_gather) arguments.biases[0]->shape[0] = chunk(n);
  ProductProblem problem = problem_of(arguments);
  problem.context.lowering = k % 2 == 0 ? Lowering::kNccl : Lowering::kGloo;
  problem.context.gemm_models = {{"float32", GemmModel::named(n % 2 == 0 ? "h100" : "cpu")}};
  PlanCache cache;
  const ProductPlan plan(std::move(problem), cache);
  std::vector<std::string> all = agreed(plan.forward());
  for (std::string& text : agreed(plan.backward(plan.all_gradients(), cache))) all.push_back(std::move(text));
  return all;
}

// Some ranks may give a weight and others its transpose. The strides of a single row fit both.
TEST(ProductArguments, WithWeightsTransposedOnSomeRanksAgreeOnAllRanks) {
  int64_t chunked = 0;
  for (const ProductFunction function : {ProductFunction::kGather, ProductFunction::kSum}) {
    for (const std::vector<int64_t>& rows : std::vector<std::vector<int64_t>>{{7}, {3, 4}, {2048}}) {
      for (const auto& [k, n] : std::vector<std::pair<int64_t, int64_t>>{{5, 6}, {6, 1}, {4097, 2048}}) {
        for (int64_t dim = -1; dim <= static_cast<int64_t>(rows.size()); ++dim) {
          if (function == ProductFunction::kGather && dim < 0) continue;
          for (const int64_t ranks : {2, 5}) {
            const auto given = [&](bool is_transposed) {
              return agreed(function, rows, k, n, dim < 0 ? std::nullopt : std::optional(dim), ranks, is_transposed);
            };
            const std::vector<std::string> as_is = given(false);
            EXPECT_EQ(as_is, given(true)) << k << " " << n << " " << dim << " on " << ranks;
            for (const std::string& text : as_is) chunked += text.starts_with("ring") || text.starts_with("collective");
          }
        }
      }
    }
  }
  EXPECT_GT(chunked, 50);
}

TEST(ProductArguments, OfLengthsThatOverflowAreRejected) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  for (const int64_t ranks : {1, 2, 3, 1000}) {
    for (const bool checks_parts : {true, false}) {
      for (const int64_t size : {most, most - 1, most / 2 + 1}) {
        ProductArguments arguments = gather();
        arguments.rank = ranks - 1;
        arguments.num_ranks = ranks;
        arguments.size = size;
        arguments.checks_parts = checks_parts;
        EXPECT_THROW(problem_of(arguments), UserError) << size << " on " << ranks;
        arguments.size = 6;
        arguments.columns = {size};
        EXPECT_THROW(problem_of(arguments), UserError) << size << " on " << ranks;
        arguments.size.reset();
        arguments.x.shape[0] = size;
        EXPECT_THROW(problem_of(arguments), UserError) << size << " on " << ranks;
      }
    }
  }
}

struct Wrong {
  ProductArguments (*good)();
  std::function<void(ProductArguments&)> change;
  const char* said;
};

TEST(ProductArguments, ErrorsNameTheArgument) {
  const DType e4m3 = DType::kFloat8E4M3FN;
  const MeshPtr other = std::make_shared<Mesh>(std::vector<std::string>{"z"}, std::vector<int64_t>{2});
  using A = ProductArguments;
  const auto scale = [&](A& a) {
    a.x.dtype = a.weights[0].dtype = e4m3;
    a.scales = {plain("x_scale", {}), plain("weight_scales[0]", {})};
  };
  const std::vector<Wrong> all{
      {gather, [](A& a) { a.weights.clear(); }, "weights must be a list of at least one weight, got none"},
      {gather, [](A& a) { a.biases.emplace_back(); }, "biases must have one entry for each of 1 weights, got 2"},
      {gather, [](A& a) { a.weights[0].shape = {3, 5}; },
       "weights[0] must have shape (4, n) for x of shape (3, 4), got (3, 5)"},
      {gather, [](A& a) { a.weights[0].dtype = DType::kFloat64; },
       "weights[0] must be torch.float32 on cpu, like x, got torch.float64 on cpu"},
      {gather, [](A& a) { a.weights[0].device = "cuda:0"; }, "like x, got torch.float32 on cuda:0"},
      {gather, [](A& a) { a.weights[0] = linear().weights[0]; },
       "weight must be a plain tensor, like x, got a DTensor"},
      {gather, [](A& a) { a.x.dtype = a.weights[0].dtype = DType::kInt64; },
       "x must have a floating dtype, got torch.int64"},
      {gather, [](A& a) { a.dim = 2; }, "gather_dim must be in [-2, 1], got 2"},
      {gather, [](A& a) { a.size.reset(); },
       "size must be the length of dim 0 of x over all 2 ranks for plain tensors, got None"},
      {gather, [](A& a) { a.size = -1; }, "rank 1 of 2 a part of 3, got -1"},
      {gather, [](A& a) { a.size = 9; },
       "size must be a total length of which torch.chunk gives rank 1 of 2 a part of 3, got 9, of which it gets 4"},
      {gather, [](A& a) { a.columns.clear(); }, "columns must be the number of columns over all 2 ranks"},
      {gather, [](A& a) { a.columns = {10, 10}; }, "columns must have one entry for each of 1 weights, got 2"},
      {gather, [](A& a) { a.biases = {plain("biases[0]", {4})}; },
       "biases[0] must have shape (5,) on rank 1, got (4,)"},
      {gather, [](A& a) { a.out_dtype = DType::kFloat32; },
       "out_dtype must be None without scales, because the result has the dtype of x, got torch.float32"},
      {gather, [&](A& a) { a.x.dtype = e4m3; },
       "x_scale must be given together with weight_scales for x of torch.float8_e4m3fn, got None"},
      {gather, [&](A& a) { scale(a), a.scales[0].reset(); },
       "x_scale must be given together with weight_scales, got None"},
      {gather, [&](A& a) { scale(a), a.scales.emplace_back(plain("", {})); },
       "weight_scales must have one entry for each of 1 weights, got 2"},
      {gather, [&](A& a) { scale(a), a.x.dtype = DType::kFloat32; },
       "x must have dtype torch.float8_e4m3fn or torch.float8_e5m2 with scales, got torch.float32"},
      {gather, [&](A& a) { scale(a), a.x.dtype = a.weights[0].dtype = DType::kFloat8E5M2; },
       "if x has torch.float8_e5m2, got torch.float8_e5m2"},
      {gather, [&](A& a) { scale(a), a.out_dtype = DType::kFloat16; },
       "out_dtype must be torch.bfloat16 or torch.float32 with scales, got torch.float16"},
      {gather, [&](A& a) { scale(a), a.biases = {plain("biases[0]", {5})}; },
       "biases[0] must have the dtype of the result (torch.bfloat16), got torch.float32"},
      {gather, [&](A& a) { scale(a), a.requires_grad = true; }, "must be False with scales, got True"},
      {gather, [&](A& a) { scale(a), a.scales[1]->dtype = DType::kFloat64; },
       "weight_scales[0] must be torch.float32 on cpu, got torch.float64"},
      {gather, [&](A& a) { scale(a), a.scales[1]->shape = {5, 1}; },
       "weight_scales[0] must have shape () for all of the operand, or (1, 5) for its rows, got (5, 1)"},
      {linear, [](A& a) { a.x.layout.reset(); }, "x must be a DTensor, got a Tensor"},
      {linear, [](A& a) { a.weights[0].layout.reset(); }, "weight must be a DTensor, like x, got a Tensor"},
      {linear, [&](A& a) { a.weights = {placed("weight", layout_on(other, {5, 4}, {"R"}))}; },
       "weight must be on the mesh of x"},
      {linear, [](A& a) { a.weights[0].dtype = DType::kFloat64; },
       "weight must have the dtype of x (torch.float32), got torch.float64"},
      {linear, [](A& a) { a.weights[0].shape = {5, 3}; },
       "weight must have shape (out_features, 4) for x of shape (3, 4), got (5, 3)"},
      {linear, [](A& a) { a.biases = {placed("bias", layout_on(mesh_of({2}), {4}, {"R"}))}; },
       "bias must have shape (5,), got (4,)"},
      {linear, [](A& a) { a.placements = {Placement::replicate(), Placement::replicate()}; },
       "placements must have one item per mesh dim, 1 for the mesh"},
      {linear, [](A& a) { a.x.shape = {}; }, "x must have 1 to 10 dims, got 0"},
  };
  for (const Wrong& wrong : all) {
    ProductArguments arguments = wrong.good();
    EXPECT_NO_THROW(problem_of(arguments));
    wrong.change(arguments);
    try {
      problem_of(arguments);
      ADD_FAILURE() << "not refused: " << wrong.said;
    } catch (const UserError& error) {
      EXPECT_NE(std::string(error.what()).find(wrong.said), std::string::npos) << error.what() << "\n" << wrong.said;
    }
  }
  EXPECT_THROW(parse_product_function("product"), UserError);
}

}  // namespace
}  // namespace shardwright
