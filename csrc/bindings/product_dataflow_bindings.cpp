// _planner: the operations of a product's forward or backward.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "bindings/views.h"
#include "products/product_plan.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// The class ProductNode in Python.
struct NodeView {
  Node node;
};

// Returns the operation of a node if it is a `Node`, else null.
template <typename Node>
const Node* operation_as(const NodeView& view) {
  return std::get_if<Node>(&view.node.operation);
}

// Defines the class ProductNode.
void define_node(py::module_& m) {
  py::class_<NodeView>(m, "ProductNode", "One operation on the tensors of a product (csrc/products/dataflow.h).")
      .def_property_readonly(
          "kind", [](const NodeView& view) { return kind_name(view.node.operation); },
          "The kind of operation: ``\"move\"``, ``\"matmul\"``, ``\"bias\"``, ``\"sum\"`` or ``\"add\"``.")
      .def_property_readonly(
          "inputs", [](const NodeView& view) { return view.node.inputs; }, "Numbers of the values that it reads.")
      .def_property_readonly(
          "outputs", [](const NodeView& view) { return view.node.outputs; },
          "Numbers of the values that it makes; -1 for an output that was not requested.")
      .def_property_readonly(
          "released", [](const NodeView& view) { return view.node.released; },
          "Numbers of the values that no later node reads.")
      .def_property_readonly(
          "plan",
          [](const NodeView& view) -> std::optional<PlanView> {
            const auto* move = operation_as<MoveNode>(view);
            if (move == nullptr) return std::nullopt;
            return view_of(move->plan);
          },
          "The plan of a move, else None.")
      .def_property_readonly(
          "matmul",
          [](const NodeView& view) -> std::optional<MatmulView> {
            const auto* matmul = operation_as<MatmulNode>(view);
            if (matmul == nullptr) return std::nullopt;
            return MatmulView{matmul->matmul};
          },
          "The `Matmul` of a matmul, else None.")
      .def_property_readonly(
          "schedule",
          [](const NodeView& view) -> std::optional<Schedule> {
            const auto* matmul = operation_as<MatmulNode>(view);
            if (matmul == nullptr) return std::nullopt;
            return matmul->schedule;
          },
          "The schedule of a matmul, else None.")
      .def(
          "adds_bias",
          [](const NodeView& view, const ProductPlan& plan, int64_t rank) {
            const auto* bias = operation_as<BiasNode>(view);
            const Layout& operand = plan.problem().operand;
            return bias != nullptr && adds_bias(*bias, operand.mesh(), position_on(operand.mesh(), Rank{rank}));
          },
          py::arg("plan"), py::arg("rank"),
          "Returns True if `rank` adds the bias. While a sum is pending, only one rank along its mesh dims adds it.");
}

}  // namespace

void define_product_dataflow(py::module_& m) {
  define_node(m);
  py::class_<DataflowView>(m, "ProductDataflow",
                           "The operations of a forward or backward. Values are numbered, inputs first.")
      .def_property_readonly(
          "names",
          [](const DataflowView& view) {
            std::vector<std::string> names;
            for (const Value& value : view.flow.values) names.push_back(value.name);
            return names;
          },
          "The name of each value.")
      .def_property_readonly(
          "layouts",
          [](const DataflowView& view) {
            std::vector<Layout> layouts;
            for (const Value& value : view.flow.values) layouts.push_back(value.layout);
            return layouts;
          },
          "The layout of each value.")
      .def_property_readonly(
          "num_inputs", [](const DataflowView& view) { return view.flow.num_inputs; }, "Number of inputs.")
      .def_property_readonly(
          "outputs", [](const DataflowView& view) { return view.flow.outputs; },
          "Numbers of the values that are outputs; -1 for an output that was not requested.")
      .def_property_readonly(
          "nodes",
          [](const DataflowView& view) {
            std::vector<NodeView> nodes;
            for (const Node& node : view.flow.nodes) nodes.push_back({node});
            return nodes;
          },
          "The nodes in execution order.");
}

}  // namespace shardwright
