#include "products/dataflow.h"

#include <algorithm>

#include "cost/cost.h"
#include "moves/step_counts.h"
#include "products/timeline.h"
#include "support/error.h"
#include "support/match.h"
#include "support/text.h"

namespace shardwright {
namespace {

// Returns for example "ring of 4 chunks".
std::string schedule_text(const Schedule& schedule) {
  const std::string chunks = schedule.distances.empty() ? std::to_string(schedule.chunks) : chunks_text(schedule);
  return concat(method_name(schedule.method), " of ", chunks, schedule.chunks == 1 ? " chunk" : " chunks");
}

// Return the text of a product whose inputs have these names: "move x to [R, R], times w plus b", or "x times w plus
// added, move it to [S(0)]".
std::string matmul_text(const GatherMatmul& matmul, const std::vector<std::string>& inputs) {
  std::vector<std::string> factors;
  size_t next_bias = 1 + matmul.products.size();
  for (size_t j = 0; j < matmul.products.size(); ++j) {
    factors.push_back(inputs[1 + j]);
    if (matmul.products[j].has_bias) factors.back() += " plus " + inputs[next_bias++];
  }
  return concat("move ", inputs[0], " to ", matmul.plan.dst.placements_string(), ", times ", join(factors, " and "));
}

std::string matmul_text(const MatmulScatter& matmul, const std::vector<std::string>& inputs) {
  std::vector<std::string> terms;
  for (size_t i = 0; i < matmul.terms.size(); ++i) terms.push_back(inputs[2 * i] + " times " + inputs[2 * i + 1]);
  if (matmul.has_addend) terms.push_back(inputs[2 * matmul.terms.size()]);
  return concat(join(terms, " plus "), ", move it to ", matmul.plan.dst.placements_string());
}

// Returns the text of a node whose inputs have these names, without its outputs and its time.
std::string operation_text(const Node& node, const std::vector<std::string>& inputs) {
  return match(
      node.operation,
      [&](const MoveNode& move) {
        std::vector<std::string> steps;
        for (const Step& step : move.plan.steps) steps.push_back(step_op_name(step.op));
        return concat("move ", inputs[0], " to ", move.plan.dst.placements_string(), ": ", join(steps));
      },
      [&](const MatmulNode& product) {
        const auto text = [&](const auto& matmul) { return matmul_text(matmul, inputs); };
        return concat(std::visit(text, product.matmul), ": ", schedule_text(product.schedule));
      },
      [&](const BiasNode& bias) {
        return concat(inputs[0], " plus ", inputs[1], bias.pending.empty() ? "" : ", on one rank of each sum");
      },
      [&](const SumNode&) { return concat("sum of ", inputs[0], " over all dims but the last"); },
      [&](const AddNode&) { return concat(inputs[0], " plus ", inputs[1]); });
}

}  // namespace

const char* kind_name(const NodeOperation& operation) {
  return match(
      operation, [](const MoveNode&) { return "move"; }, [](const MatmulNode&) { return "matmul"; },
      [](const BiasNode&) { return "bias"; }, [](const SumNode&) { return "sum"; },
      [](const AddNode&) { return "add"; });
}

int64_t predicted_picoseconds(const Dataflow& flow, const Node& node, const ProductContext& context) {
  const auto memory_ps = [&] {
    int64_t bytes = 0;
    for (const std::vector<int>& values : {node.inputs, node.outputs}) {
      for (const int value : values) bytes += flow.values[value].layout.largest_part_bytes();
    }
    return picoseconds_for(bytes, context.known_topology().memory_ps_per_kib);
  };
  return match(
      node.operation, [](const MoveNode& move) { return predicted_picoseconds(move.plan); },
      [&](const MatmulNode& product) {
        const GemmModel& model = context.gemm_model(plan_of(product.matmul).src.dtype());
        return predict(product.matmul, product.schedule, model).total_ps;
      },
      [&](const BiasNode&) { return memory_ps(); }, [&](const SumNode&) { return memory_ps(); },
      [&](const AddNode&) { return memory_ps(); });
}

bool adds_bias(const BiasNode& node, const Mesh& mesh, int64_t position) {
  const std::vector<int> dims = node.pending.to_vector();
  return std::all_of(dims.begin(), dims.end(), [&](int d) { return mesh.coordinate(position, d) == 0; });
}

int64_t predicted_picoseconds(const Dataflow& flow, const ProductContext& context) {
  int64_t total = 0;
  for (const Node& node : flow.nodes) total = saturating_sum(total, predicted_picoseconds(flow, node, context));
  return total;
}

std::string to_string(const Dataflow& flow, const ProductContext& context, const std::string& indent) {
  const auto names = [&](const std::vector<int>& values) {
    std::vector<std::string> all;
    for (const int value : values) all.push_back(flow.values[value].name);
    return all;
  };
  std::vector<std::string> lines;
  for (const Node& node : flow.nodes) {
    lines.push_back(concat(indent, join(names(node.outputs)), " = ", operation_text(node, names(node.inputs)), ", ",
                           microseconds_text(predicted_picoseconds(flow, node, context))));
  }
  return join(lines, "\n");
}

int DataflowBuilder::input(std::string name, Layout layout) {
  check_invariant(flow_.nodes.empty(), "an input was declared after a node");
  flow_.values.push_back({std::move(name), std::move(layout)});
  return flow_.num_inputs++;
}

std::vector<int> DataflowBuilder::append(NodeOperation operation, std::vector<int> inputs,
                                         const std::vector<Value>& outputs) {
  std::vector<int> written;
  for (const Value& value : outputs) {
    written.push_back(static_cast<int>(flow_.values.size()));
    flow_.values.push_back(value);
  }
  flow_.nodes.push_back({std::move(operation), std::move(inputs), written, {}});
  return written;
}

int DataflowBuilder::move(int value, const Layout& dst) {
  if (layout(value) == dst) return value;
  Plan plan = planner_.plan(layout(value), dst);
  return append(MoveNode{std::move(plan)}, {value}, {{flow_.values[value].name + "'", dst}})[0];
}

std::vector<int> DataflowBuilder::multiply(Matmul matmul, std::vector<int> inputs, const std::vector<Value>& outputs,
                                           bool is_request_binding) {
  check(matmul, {});
  const GemmModel& model = planner_.context().gemm_model(plan_of(matmul).src.dtype());
  Schedule schedule = choose_schedule(matmul, request_, model, is_request_binding);
  return append(MatmulNode{std::move(matmul), std::move(schedule)}, std::move(inputs), outputs);
}

int DataflowBuilder::add_bias(int value, int bias) {
  const Layout& sum = layout(value);
  MeshDimSet pending;
  for (const int d : sum.partial_dims().to_vector()) {
    if (sum.placements()[d].op == ReduceOp::kSum) pending.insert(d);
  }
  return append(BiasNode{pending}, {value, bias}, {{flow_.values[value].name + "+", sum}})[0];
}

int DataflowBuilder::sum_rows(int value, Layout layout) {
  return append(SumNode{}, {value}, {{"sum " + flow_.values[value].name, std::move(layout)}})[0];
}

int DataflowBuilder::add(int a, int b) {
  return append(AddNode{}, {a, b}, {{flow_.values[a].name + "+", layout(a)}})[0];
}

Dataflow DataflowBuilder::finish(std::vector<int> outputs) {
  std::vector<bool> is_read_later(flow_.values.size(), false);  // by a later node, or as an output
  for (const int value : outputs) {
    if (value != Dataflow::kAbsent) is_read_later[value] = true;
  }
  for (size_t i = flow_.nodes.size(); i-- > 0;) {
    Node& node = flow_.nodes[i];
    for (const std::vector<int>& values : {node.inputs, node.outputs}) {
      for (const int value : values) {
        if (!is_read_later[value]) node.released.push_back(value);
        is_read_later[value] = true;
      }
    }
  }
  flow_.outputs = std::move(outputs);
  return std::move(flow_);
}

}  // namespace shardwright
