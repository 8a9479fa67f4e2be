// Product plans as text and as JSON.
#include "planning/json.h"
#include "products/product_plan.h"
#include "support/error.h"
#include "support/text.h"

namespace shardwright {
namespace {

// A tensor of a plan, before and while the product computes.
struct Tensor {
  std::string name;      // "x", "w", "y1"
  const Layout& layout;  // of the given operand or weight, or of the requested result
  const Layout& during;  // of the tensor while the product computes
};

// Returns the operand, then weight and result of each product. The tensors refer to the plan.
std::vector<Tensor> tensors_of(const ProductPlan& plan) {
  const ProductProblem& problem = plan.problem();
  const size_t count = problem.weights.size();
  std::vector<Tensor> tensors{{"x", problem.operand, plan.layouts().operand}};
  for (size_t j = 0; j < count; ++j) {
    tensors.push_back({numbered("w", j, count), problem.weights[j], plan.layouts().weights[j]});
    tensors.push_back({numbered("y", j, count), problem.results[j], plan.layouts().results[j]});
  }
  return tensors;
}

// Returns for example "b along dp, none along tp".
std::string cuts_text(const ProductPlan& plan) {
  const Mesh& mesh = plan.problem().operand.mesh();
  std::vector<std::string> cuts;
  for (int d = 0; d < mesh.ndim(); ++d) {
    const char axis = plan.cuts()[d];
    cuts.push_back(axis == kNoAxis ? concat("none along ", mesh.dim_names()[d])
                                   : concat(std::string(1, axis), " along ", mesh.dim_names()[d]));
  }
  return join(cuts);
}

// Returns the title, the predicted time, and one line for each node: "forward, 214 us:" and the lines.
std::string flow_text(const char* title, const Dataflow& flow, const ProductContext& context) {
  const std::string time = microseconds_text(predicted_picoseconds(flow, context));
  return concat(title, ", ", time, flow.nodes.empty() ? "" : ":\n", to_string(flow, context, "  "));
}

// The functions below return pieces of JSON. `value` and `items` are JSON already; names are quoted here.
std::string json_field(const std::string& name, const std::string& value) { return quoted(name) + ": " + value; }

std::string json_list(const std::vector<std::string>& items) { return "[" + join(items) + "]"; }

std::string json_lines(const std::vector<std::string>& items) {
  return items.empty() ? "[]" : "[\n    " + join(items, ",\n    ") + "\n  ]";
}

std::string json_placements(const Layout& layout) {
  std::vector<std::string> placements;
  for (const Placement& placement : layout.placements()) placements.push_back(quoted(placement.to_string()));
  return json_list(placements);
}

std::string json_flow(const Dataflow& flow, const ProductContext& context) {
  const auto names = [&](const std::vector<int>& values) {
    std::vector<std::string> all;
    for (const int value : values) {
      if (value != Dataflow::kAbsent) all.push_back(quoted(flow.values[value].name));
    }
    return json_list(all);
  };
  std::vector<std::string> nodes;
  for (const Node& node : flow.nodes) {
    std::vector<std::string> fields{json_field("kind", quoted(kind_name(node.operation))),
                                    json_field("inputs", names(node.inputs)),
                                    json_field("outputs", names(node.outputs))};
    if (const auto* matmul = std::get_if<MatmulNode>(&node.operation)) {
      fields.push_back(json_field("method", quoted(method_name(matmul->schedule.method))));
      fields.push_back(json_field("chunks", quoted(chunks_text(matmul->schedule))));
    }
    fields.push_back(json_field("predicted_ps", std::to_string(predicted_picoseconds(flow, node, context))));
    nodes.push_back("{" + join(fields) + "}");
  }
  return concat("{", json_field("outputs", names(flow.outputs)), ", ",
                json_field("predicted_ps", std::to_string(predicted_picoseconds(flow, context))), ", ",
                json_field("nodes", json_lines(nodes)), "}");
}

}  // namespace

std::string ProductPlan::to_string(PlanCache& cache) const {
  std::string text =
      concat(join(problem_.axes, " and "), " on ", problem_.operand.mesh().to_string(), ", cut: ", cuts_text(*this),
             "; the ", lead_name(lead_), "'s move overlaps with the product");
  for (const Tensor& tensor : tensors_of(*this)) {
    text += concat("\n  ", tensor.name, " = ", tensor.layout.dtype().name(), "[", join(tensor.layout.shape()), "] as ",
                   tensor.layout.placements_string(), ", during the product ", tensor.during.placements_string());
  }
  text += "\n" + flow_text("forward", forward_, problem_.context);
  if (!layouts_.gradients) return text;
  return text + "\n" + flow_text("backward", backward(all_gradients(), cache), problem_.context);
}

std::string ProductPlan::to_json(PlanCache& cache) const {
  const Mesh& mesh = problem_.operand.mesh();
  std::vector<std::string> names;
  std::vector<std::string> cuts;
  std::vector<std::string> axes;
  for (int d = 0; d < mesh.ndim(); ++d) {
    names.push_back(quoted(mesh.dim_names()[d]));
    cuts.push_back(cuts_[d] == kNoAxis ? "null" : quoted(std::string(1, cuts_[d])));
  }
  for (const std::string& product_axes : problem_.axes) axes.push_back(quoted(product_axes));
  std::vector<std::string> tensors;
  for (const Tensor& tensor : tensors_of(*this)) {
    tensors.push_back(
        "{" +
        join(std::vector<std::string>{json_field("name", quoted(tensor.name)),
                                      json_field("dtype", quoted(tensor.layout.dtype().name())),
                                      json_field("shape", "[" + join(tensor.layout.shape()) + "]"),
                                      json_field("placements", json_placements(tensor.layout)),
                                      json_field("placements_while_computing", json_placements(tensor.during))}) +
        "}");
  }
  const std::string absent = "null";
  const std::vector<std::string> fields{
      json_field("version", "1"),
      json_field("backend", quoted(std::string(problem_.context.lowering.name))),
      json_field("dim_names", json_list(names)),
      json_field("dim_sizes", "[" + join(mesh.dim_sizes()) + "]"),
      json_field("axes", json_list(axes)),
      json_field("cuts", json_list(cuts)),
      json_field("lead", quoted(lead_name(lead_))),
      json_field("tensors", json_lines(tensors)),
      json_field("forward", json_flow(forward_, problem_.context)),
      json_field("backward",
                 layouts_.gradients ? json_flow(backward(all_gradients(), cache), problem_.context) : absent)};
  return "{\n  " + join(fields, ",\n  ") + "\n}";
}

}  // namespace shardwright
