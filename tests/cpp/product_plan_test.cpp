// Product plans: forward and backward on simulated ranks against full tensors, and choices against brute force.
#include <gtest/gtest.h>

#include <set>

#include "dense.h"
#include "products/compile.h"
#include "products/product_plan.h"
#include "products/serialize.h"
#include "random_problem.h"
#include "search/make_plan.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr int kProblems = 400;

using Parts = std::vector<Payload>;  // by position

// Runs the programs of all ranks, which equal positions. Returns outputs by their number, then by position.
std::vector<Parts> run(const std::vector<Program>& programs, const std::vector<const Parts*>& inputs) {
  std::vector<std::vector<Payload>> by_position(programs.size());
  for (const Parts* parts : inputs) {
    for (size_t p = 0; p < programs.size(); ++p) by_position[p].push_back((*parts)[p]);
  }
  Machine machine;
  for (size_t p = 0; p < programs.size(); ++p) machine.add(Rank(p), programs[p], by_position[p]);
  machine.run();
  std::vector<Parts> outputs(programs[0].outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (size_t p = 0; p < programs.size(); ++p) outputs[i].push_back(machine.output(Rank(p), i));
  }
  return outputs;
}

// Runs every node on all ranks, and releases values at the nodes that the list names.
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
    for (int64_t p = 0; p < mesh().size(); ++p) programs.push_back(compile(node.plan, Rank{p}));
    return run(programs, inputs(at));
  }

  std::vector<Parts> execute(const MatmulNode& node, const Node& at) {
    std::vector<Program> programs;
    for (int64_t p = 0; p < mesh().size(); ++p) {
      programs.push_back(compile(node.matmul, node.schedule, Rank{p}));
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

// The full tensors of a problem.
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
    made.scales.push_back(
        random_dense(by_row ? plan.row_scales_layout(i, of).shape() : std::vector<int64_t>{}, random));
  }
  return made;
}

Dense with_bias(Dense result, const Dense& bias) {
  for (size_t i = 0; i < result.values.size(); ++i) result.values[i] += bias.values[i % bias.values.size()];
  return result;
}

// Returns an operand's elements times its scales.
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
  if (source.pick(0, 2) == 0) request.addend = source.elsewhere(problem.operand, true);
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
  if (request.addend) add(dx);
  if (!request.addend) dx.values.assign(dx.values.size(), 0);
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
  int64_t by_rule = 0;  // problems whose operand has cuts by other rules during the product
  for (unsigned seed = 0; seed < kProblems; ++seed) {
    RandomProblem source(seed, seed % 2 == 1);
    ProductProblem& problem = *source.problem;
    if (problem.scaled_by == ScaledBy::kRow && source.pick(0, 1) == 1) {
      const ProductPlan rows(problem, cache);
      for (size_t i = 0; i <= problem.weights.size(); ++i) {
        const Layout& of = i == 0 ? problem.operand : problem.weights[i - 1];
        problem.scales.emplace_back();
        if (source.pick(0, 1) == 1) problem.scales[i] = source.elsewhere(rows.row_scales_layout(i, of), false);
      }
    }
    const ProductPlan plan(product_problem_from_bytes(to_bytes(problem)), cache);
    SCOPED_TRACE(concat("seed ", seed, "\n", plan.to_string(cache)));
    seen.emplace(plan.lead(), problem.scaled_by, problem.weights.size() > 1);
    const std::vector<Placement>& during = plan.layouts().operand.placements();
    by_rule += std::any_of(during.begin(), during.end(),
                           [](const Placement& p) { return p.kind == PlacementKind::kShardByRule; });
    const Tensors tensors = tensors_of(plan, source.random());
    expect_forward(plan, tensors, run_forward(plan, tensors, source.random()));
    if (problem.scaled_by == ScaledBy::kNothing) check_backward(plan, tensors, source, cache);
    if (HasFailure()) return;
  }
  EXPECT_GT(by_rule, kProblems / 20);
  for (const ScaledBy scaled : {ScaledBy::kNothing, ScaledBy::kTensor, ScaledBy::kRow}) {
    EXPECT_TRUE(seen.contains({Lead::kOperand, scaled, true}));
    for (const Lead lead : {Lead::kOperand, Lead::kWeight, Lead::kResult}) {
      EXPECT_TRUE(seen.contains({lead, scaled, false})) << lead_name(lead);
    }
  }
}

TEST(ProductPlan, RejectsInvalidProblems) {
  const MeshPtr mesh = mesh_of({2});
  const Layout x = layout_on(mesh, {4, 6}, {"S(0)"});
  const Layout w = layout_on(mesh, {6, 8}, {"R"});
  const Layout y = layout_on(mesh, {4, 8}, {"S(0)"});
  PlanCache cache;
  const auto refuses = [&](ProductProblem problem, const std::string& said) {
    problem.context = context(Lowering::kNccl);
    try {
      const ProductPlan plan(problem, cache);
      ADD_FAILURE() << "took what has wrong " << said;
    } catch (const UserError& error) {
      EXPECT_EQ(std::string(error.what()).substr(0, said.size()), said) << error.what();
    }
  };
  refuses({{}, x, {}, {}, {}}, "weights");
  refuses({{"mk,kn->mn"}, x, {w}, {}, {y}}, "axes, biases and results");
  refuses({{"mk,kn->mn"}, x, {layout_on(mesh, {5, 8}, {"R"})}, {{}}, {y}}, "weights[0]");
  refuses({{"mk,kn->mn"}, x, {w}, {{}}, {layout_on(mesh, {4, 7}, {"R"})}}, "results[0]");
  refuses({{"mk,kn->mn"}, x, {w}, {w}, {y}}, "biases[0]");
  refuses({{"mk,kn->mn"}, x, {w}, {{}}, {y}, "x"}, "cuts");
  refuses({{"mk,kn->mn"}, x, {w}, {{}}, {layout_on(mesh_of({3}), {4, 8}, {"R"})}}, "mesh");
  ProductProblem sums{{"mk,kn->mn"},
                      layout_on(mesh, {4, 6}, {"S(1)"}),
                      {layout_on(mesh, {6, 8}, {"S(0)"})},
                      {{}},
                      {layout_on(mesh, {4, 8}, {"R"})}};
  sums.schedule.method = Method::kRing;
  refuses(sums, "method must be one of serial, collective, got 'ring'");
}

}  // namespace
}  // namespace shardwright
