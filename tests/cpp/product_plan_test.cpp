// Product plans: forward and backward on simulated ranks against whole tensors, choices against brute force.
#include <gtest/gtest.h>

#include <set>

#include "dense.h"
#include "moves/figures.h"
#include "products.h"
#include "products/compile.h"
#include "products/product_plan.h"
#include "search/make_plan.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr int kProblems = 400;

using Parts = std::vector<Payload>;  // by position

// Runs programs of all ranks; outputs by their number, then by position.
std::vector<Parts> run(const std::vector<Program>& programs, const std::vector<const Parts*>& inputs) {
  std::vector<std::vector<Payload>> by_position(programs.size());
  for (const Parts* parts : inputs) {
    for (size_t p = 0; p < programs.size(); ++p) by_position[p].push_back((*parts)[p]);
  }
  Machine machine(programs, by_position);
  machine.run();
  std::vector<Parts> outputs(programs[0].outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (size_t p = 0; p < programs.size(); ++p) outputs[i].push_back(machine.output(static_cast<int64_t>(p), i));
  }
  return outputs;
}

// Every node on all ranks, with values released when the list says so.
class Runner {
 public:
  Runner(const Dataflow& flow, std::vector<Parts> inputs) : flow_(flow), values_(flow.values.size()) {
    EXPECT_EQ(static_cast<int>(inputs.size()), flow.num_inputs);
    for (size_t i = 0; i < inputs.size(); ++i) values_[i] = std::move(inputs[i]);
  }

  std::vector<std::optional<Parts>> outputs() {
    for (const Node& node : flow_.nodes) {
      std::vector<Parts> made =
          std::visit([&](const auto& operation) { return execute(operation, node); }, node.operation);
      for (size_t i = 0; i < node.outputs.size(); ++i) values_[node.outputs[i]] = std::move(made[i]);
      for (const int value : node.released) values_[value].reset();
    }
    std::vector<std::optional<Parts>> found;
    for (const int value : flow_.outputs) {
      found.push_back(value == Dataflow::kAbsent ? std::nullopt : values_[value]);
    }
    return found;
  }

 private:
  const Layout& layout(int value) const { return flow_.values[value].layout; }
  const Mesh& mesh() const { return layout(0).mesh(); }

  std::vector<const Parts*> inputs(const Node& node) const {
    std::vector<const Parts*> parts;
    for (const int value : node.inputs) {
      EXPECT_TRUE(values_[value].has_value()) << flow_.values[value].name << " was released";
      parts.push_back(&*values_[value]);
    }
    return parts;
  }

  std::vector<Parts> execute(const MoveNode& node, const Node& at) {
    EXPECT_EQ(node.plan.src, layout(at.inputs[0]));
    EXPECT_EQ(node.plan.dst, layout(at.outputs[0]));
    std::vector<Program> programs;
    for (int64_t p = 0; p < mesh().size(); ++p) programs.push_back(compile(node.plan, p));
    return run(programs, inputs(at));
  }

  std::vector<Parts> execute(const MatmulNode& node, const Node& at) {
    std::vector<Program> programs;
    for (int64_t p = 0; p < mesh().size(); ++p) {
      programs.push_back(compile(node.matmul, node.schedule, p));
      for (size_t i = 0; i < at.outputs.size(); ++i) {
        EXPECT_EQ(programs[p].outputs[i].shape, layout(at.outputs[i]).local_shape(p));
      }
    }
    return run(programs, inputs(at));
  }

  std::vector<Parts> execute(const BiasNode& node, const Node& at) {
    Parts sums = *inputs(at)[0];
    const Parts& biases = *inputs(at)[1];
    for (int64_t p = 0; p < mesh().size(); ++p) {
      if (!adds_bias(node, mesh(), p)) continue;
      for (size_t i = 0; i < sums[p].size(); ++i) sums[p][i] += biases[p][i % biases[p].size()];
    }
    return {sums};
  }

  std::vector<Parts> execute(const SumNode&, const Node& at) {
    Parts sums;
    for (int64_t p = 0; p < mesh().size(); ++p) {
      sums.emplace_back(layout(at.inputs[0]).local_shape(p).back(), 0.0);
      const Payload& values = (*inputs(at)[0])[p];
      for (size_t i = 0; i < values.size(); ++i) sums[p][i % sums[p].size()] += values[i];
    }
    return {sums};
  }

  std::vector<Parts> execute(const AddNode&, const Node& at) {
    Parts sums = *inputs(at)[0];
    for (int64_t p = 0; p < mesh().size(); ++p) {
      for (size_t i = 0; i < sums[p].size(); ++i) sums[p][i] += (*inputs(at)[1])[p][i];
    }
    return {sums};
  }

  const Dataflow& flow_;
  std::vector<std::optional<Parts>> values_;
};

const ProductContext& context(Backend backend) {
  static const GemmModel model = GemmModel::named("cpu");
  static const std::map<std::string, GemmModel> models{
      {"float32", model}, {"bfloat16", model}, {"float8_e4m3fn", model}, {"float8_e5m2", model}};
  static const ProductContext contexts[] = {{Backend::kNccl, std::nullopt, {}, models},
                                            {Backend::kGloo, std::nullopt, {}, models}};
  return contexts[static_cast<int>(backend)];
}

// Any axes, sizes and placements, one to three weights, cuts given or not, scaled or not.
class RandomProblem {
 public:
  explicit RandomProblem(unsigned seed) : random_(seed) {
    std::vector<int64_t> mesh_sizes;
    for (int64_t d = 0, dims = pick(1, 2); d < dims; ++d) mesh_sizes.push_back(pick(1, dims == 1 ? 4 : 3));
    mesh_ = mesh_of(mesh_sizes);
    const auto letters = [&](char first) {
      return std::string{first, static_cast<char>(first + 1)}.substr(pick(0, 1));
    };
    const std::string rows = letters('a');
    const std::string columns = letters('n');
    const std::string summed = letters('k');
    for (const char letter : rows + summed) sizes_[letter] = size();
    const ScaledBy scaled_by = static_cast<ScaledBy>(pick(0, 3) == 0 ? pick(1, 2) : 0);
    const bool is_scaled = scaled_by != ScaledBy::kNothing;
    const char* dtype = is_scaled ? "float8_e4m3fn" : "float32";
    const char* result_dtype = is_scaled ? "bfloat16" : "float32";
    const std::string operand = shuffled(rows + summed);
    ProductProblem made{{}, any_layout(operand, dtype, !is_scaled), {}, {}, {}};
    made.scaled_by = scaled_by;
    made.keeps_gathered = pick(0, 1) == 1;
    made.context = context(static_cast<Backend>(pick(0, 1)));
    for (int64_t j = 0, count = pick(0, 2) == 0 ? pick(2, 3) : 1; j < count; ++j) {
      for (const char letter : columns) sizes_[letter] = size();
      const std::string weight = shuffled(summed + columns);
      const std::string result = shuffled(rows + columns);
      made.axes.push_back(operand + "," + weight + "->" + result);
      made.weights.push_back(any_layout(weight, dtype, !is_scaled));
      made.results.push_back(any_layout(result, result_dtype, true));
      made.biases.emplace_back();
      if (pick(0, 1) == 1) made.biases[j] = any_layout(std::string(1, result.back()), result_dtype, true);
    }
    if (pick(0, 1) == 1) {
      made.cuts.emplace();
      const std::string axes = std::string(1, kNoAxis) + rows + columns + summed;
      for (int d = 0; d < mesh_->ndim(); ++d) {
        made.cuts->push_back(axes[static_cast<size_t>(pick(0, static_cast<int64_t>(axes.size()) - 1))]);
      }
    }
    problem = std::make_unique<ProductProblem>(std::move(made));
  }

  int64_t pick(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random_); }
  std::mt19937& random() { return random_; }

  Layout elsewhere(const Layout& layout, bool may_be_due) {
    std::vector<std::string> placements;
    for (int d = 0; d < mesh_->ndim(); ++d) {
      const int64_t dim = pick(-1 - static_cast<int64_t>(may_be_due && pick(0, 2) == 0), layout.ndim() - 1);
      placements.push_back(dim == -2 ? "P" : dim == -1 ? "R" : concat("S(", dim, ")"));
    }
    return layout_on(mesh_, layout.shape(), placements, layout.dtype().name().c_str());
  }

  std::unique_ptr<ProductProblem> problem;

 private:
  int64_t size() { return pick(0, 9) == 0 ? 0 : pick(1, 5); }

  std::string shuffled(std::string letters) {
    std::shuffle(letters.begin(), letters.end(), random_);
    return letters;
  }

  Layout any_layout(const std::string& letters, const char* dtype, bool may_be_due) {
    std::vector<int64_t> shape;
    for (const char letter : letters) shape.push_back(sizes_[letter]);
    return elsewhere(layout_on(mesh_, shape, std::vector<std::string>(mesh_->ndim(), "R"), dtype), may_be_due);
  }

  std::mt19937 random_;
  MeshPtr mesh_;
  std::map<char, int64_t> sizes_;
};

// The whole tensors of a problem.
struct Tensors {
  Dense operand;
  std::vector<Dense> weights;
  std::vector<std::optional<Dense>> biases;
  std::vector<Dense> scales;
};

Tensors tensors_of(const ProductPlan& plan, std::mt19937& random) {
  const ProductProblem& problem = plan.problem();
  Tensors made{random_dense(problem.operand.shape(), random), {}, {}, {}};
  for (const Layout& weight : problem.weights) made.weights.push_back(random_dense(weight.shape(), random));
  for (const auto& bias : problem.biases) {
    made.biases.emplace_back();
    if (bias) made.biases.back() = random_dense(bias->shape(), random);
  }
  for (size_t i = 0; i <= problem.weights.size() && problem.scaled_by != ScaledBy::kNothing; ++i) {
    const Layout& of = i == 0 ? problem.operand : problem.weights[i - 1];
    const bool by_row = problem.scaled_by == ScaledBy::kRow;
    made.scales.push_back(random_dense(by_row ? plan.rows_of(i, of).shape() : std::vector<int64_t>{}, random));
  }
  return made;
}

Dense with_bias(Dense result, const Dense& bias) {
  for (size_t i = 0; i < result.values.size(); ++i) result.values[i] += bias.values[i % bias.values.size()];
  return result;
}

// An operand's elements times its scales.
Dense scaled_by(const Dense& operand, const Dense& scale, const std::string& letters, const std::string& result) {
  std::string rows;
  for (const char letter : letters) rows += result.find(letter) == std::string::npos ? "" : std::string(1, letter);
  return einsum(letters, operand, scale.shape.empty() ? "" : rows, scale, letters);
}

void expect_forward(const ProductPlan& plan, const Tensors& tensors, std::vector<std::optional<Parts>> outputs) {
  const ProductProblem& problem = plan.problem();
  for (size_t j = 0; j < problem.weights.size(); ++j) {
    const auto [operand, weight, result] = AxisLetters::parse(problem.axes[j]);
    Dense x = tensors.operand;
    Dense w = tensors.weights[j];
    if (!tensors.scales.empty()) {
      x = scaled_by(x, tensors.scales[0], operand, result);
      w = scaled_by(w, tensors.scales[j + 1], weight, result);
    }
    Dense y = einsum(operand, x, weight, w, result);
    if (tensors.biases[j]) y = with_bias(std::move(y), *tensors.biases[j]);
    expect_parts(*outputs[j], y, problem.results[j]);
  }
  EXPECT_EQ(outputs.size(), problem.weights.size() + plan.keeps_gathered());
  if (plan.keeps_gathered()) expect_parts(*outputs.back(), tensors.operand, plan.layouts().operand);
}

std::vector<std::optional<Parts>> run_forward(const ProductPlan& plan, const Tensors& tensors, std::mt19937& random) {
  const ProductProblem& problem = plan.problem();
  std::vector<Parts> inputs;
  const std::vector<Value>& values = plan.forward().values;
  const auto add = [&](const Dense& dense) { inputs.push_back(parts_of(dense, values[inputs.size()].layout, random)); };
  add(tensors.operand);
  for (const Dense& weight : tensors.weights) add(weight);
  for (const auto& bias : tensors.biases) {
    if (bias) add(*bias);
  }
  for (const Dense& scale : tensors.scales) add(scale);
  EXPECT_EQ(values[0].layout, problem.operand);
  return Runner(plan.forward(), inputs).outputs();
}

void check_backward(const ProductPlan& plan, const Tensors& tensors, RandomProblem& source, PlanCache& cache) {
  const ProductProblem& problem = plan.problem();
  GradientRequest request;
  request.operand = source.pick(0, 3) > 0;
  request.has_addend = source.pick(0, 2) == 0;
  std::vector<Dense> dys;
  const size_t count = problem.weights.size();
  for (size_t j = 0; j < count; ++j) {
    request.given.push_back(source.elsewhere(problem.results[j], true));
    request.weights.push_back(source.pick(0, 3) > 0);
    request.biases.push_back(problem.biases[j] && source.pick(0, 3) > 0);
    dys.push_back(random_dense(problem.results[j].shape(), source.random()));
  }
  SCOPED_TRACE(to_string(plan.backward(request, cache), problem.context));
  const Dataflow flow = plan.backward(request, cache);
  std::vector<Parts> inputs;
  const auto add = [&](const Dense& dense) {
    inputs.push_back(parts_of(dense, flow.values[inputs.size()].layout, source.random()));
  };
  Dense dx = random_dense(problem.operand.shape(), source.random());
  add(tensors.operand);
  for (const Dense& weight : tensors.weights) add(weight);
  for (const Dense& dy : dys) add(dy);
  if (request.has_addend) add(dx);
  if (!request.has_addend) dx.values.assign(dx.values.size(), 0);
  const std::vector<std::optional<Parts>> outputs = Runner(flow, inputs).outputs();
  ASSERT_EQ(outputs.size(), 1 + 2 * count);
  for (size_t j = 0; j < count; ++j) {
    const auto [operand, weight, result] = AxisLetters::parse(problem.axes[j]);
    const Dense part = einsum(result, dys[j], weight, tensors.weights[j], operand);
    for (size_t i = 0; i < part.values.size(); ++i) dx.values[i] += part.values[i];
    EXPECT_EQ(outputs[1 + j].has_value(), request.weights[j]);
    if (request.weights[j]) {
      const Dense dw = einsum(result, dys[j], operand, tensors.operand, weight);
      expect_parts(*outputs[1 + j], dw, without_sums(problem.weights[j]));
    }
    EXPECT_EQ(outputs[1 + count + j].has_value(), request.biases[j]);
    if (request.biases[j]) {
      Dense db{{dys[j].shape.back()}, Payload(dys[j].shape.back(), 0)};
      for (size_t i = 0; i < dys[j].values.size(); ++i) db.values[i % db.values.size()] += dys[j].values[i];
      expect_parts(*outputs[1 + count + j], db, without_sums(*problem.biases[j]));
    }
  }
  EXPECT_EQ(outputs[0].has_value(), request.operand);
  if (request.operand) expect_parts(*outputs[0], dx, plan.layouts().gradients->operand_out);
}

TEST(ProductPlan, RunsForwardAndBackwardOnAllRanks) {
  PlanCache cache;
  std::set<std::tuple<Lead, ScaledBy, bool>> seen;
  for (unsigned seed = 0; seed < kProblems; ++seed) {
    RandomProblem source(seed);
    ProductProblem& problem = *source.problem;
    if (problem.scaled_by == ScaledBy::kRow && source.pick(0, 1) == 1) {
      const ProductPlan rows(problem, cache);
      for (size_t i = 0; i <= problem.weights.size(); ++i) {
        const Layout& of = i == 0 ? problem.operand : problem.weights[i - 1];
        problem.scales.emplace_back();
        if (source.pick(0, 1) == 1) problem.scales[i] = source.elsewhere(rows.rows_of(i, of), false);
      }
    }
    const ProductPlan plan(parse_problem(to_text(problem)), cache);
    SCOPED_TRACE(concat("seed ", seed, "\n", plan.to_string(cache)));
    seen.emplace(plan.lead(), problem.scaled_by, problem.weights.size() > 1);
    const Tensors tensors = tensors_of(plan, source.random());
    expect_forward(plan, tensors, run_forward(plan, tensors, source.random()));
    if (problem.scaled_by == ScaledBy::kNothing) check_backward(plan, tensors, source, cache);
    if (HasFailure()) return;
  }
  for (const ScaledBy scaled : {ScaledBy::kNothing, ScaledBy::kTensor, ScaledBy::kRow}) {
    EXPECT_TRUE(seen.contains({Lead::kOperand, scaled, true}));
    for (const Lead lead : {Lead::kOperand, Lead::kWeight, Lead::kResult}) {
      EXPECT_TRUE(seen.contains({lead, scaled, false})) << lead_name(lead);
    }
  }
}

}  // namespace
}  // namespace shardwright
