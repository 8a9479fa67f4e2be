// A product's operations as data: a list of nodes, executed one after the other and the same on every rank.
//
// Values are tensors. They are numbered, and each is written once; the first values are the inputs. A node reads values
// and writes new values.
//
//   x, w, b          inputs
//   0. b' = move b to [S(0)]
//   1. y = gather x to [R, R], times w, plus b'
//
// The executor of a list (the Python package, a test) runs its nodes in order and, after each, frees the values that
// the node releases.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "products/product_choices.h"

namespace shardwright {

// A tensor that is an input of the list, or that one node writes.
struct Value {
  std::string name;  // in texts, such as "x" and "w1"
  Layout layout;
};

// Redistributes its one input by a plan, apart from any product.
struct MoveNode {
  Plan plan;
};

// Runs the program of a Matmul, whose inputs and outputs are those of the node (products/matmul.h).
struct MatmulNode {
  Matmul matmul;
  Schedule schedule;
};

// Adds a bias. Inputs: a tensor, and a bias along its last dim. Sums of the tensor are pending along the mesh dims
// `pending`, so only the first rank along these mesh dims adds the bias. On other ranks the output is the tensor
// unchanged. If `pending` is empty, every rank adds the bias, also where an average, minimum or maximum is pending.
struct BiasNode {
  MeshDimSet pending;
};

// The sum over all dims but the last, for the gradient of a bias. Each rank sums its own part.
struct SumNode {};

// The sum of two tensors of the same layout.
struct AddNode {};

using NodeOperation = std::variant<MoveNode, MatmulNode, BiasNode, SumNode, AddNode>;

// One operation. The integers below are indices into Dataflow::values.
struct Node {
  NodeOperation operation;
  std::vector<int> inputs;
  std::vector<int> outputs;
  // Values that the executor frees after this node: no later node reads them, and they are not outputs of the list.
  std::vector<int> released;
};

// The list of nodes.
struct Dataflow {
  static constexpr int kAbsent = -1;

  std::vector<Value> values;  // the inputs, then what nodes write, in order
  int num_inputs = 0;
  std::vector<Node> nodes;
  // Indices of values, or kAbsent for outputs that were not requested.
  std::vector<int> outputs;
};

// Returns true if the rank at this position of the mesh adds the bias of the node.
bool adds_bias(const BiasNode& node, const Mesh& mesh, int64_t position);

// Return the predicted picoseconds of the slowest rank, for all nodes one after the other, or for one node. Moves take
// the time that their plans predict, products the time of their schedule's timeline (timeline.h), and other nodes the
// time to read and write their values in memory. Throw UserError if the context lacks the GEMM model of a dtype.
int64_t predicted_picoseconds(const Dataflow& flow, const ProductContext& context);
int64_t predicted_picoseconds(const Dataflow& flow, const Node& node, const ProductContext& context);

// Returns "move", "matmul", "bias", "sum" or "add".
const char* kind_name(const NodeOperation& operation);

// Returns one line per node, each beginning with `indent`, such as "y = x times w, move it to [S(0)]: ring of 4 chunks,
// 214 us". Throws as predicted_picoseconds does.
std::string to_string(const Dataflow& flow, const ProductContext& context, const std::string& indent = "");

// Builds a list: first its inputs, then node by node. Functions return the values (indices into Dataflow::values) that
// the new input or node writes.
class DataflowBuilder {
 public:
  // The planner must outlive the builder. `request` applies to all products.
  DataflowBuilder(const MovePlanner& planner, ScheduleRequest request)
      : planner_(planner), request_(std::move(request)) {}

  // Adds the next input. Must be called before any node is appended.
  int input(std::string name, Layout layout);
  const Layout& layout(int value) const { return flow_.values[value].layout; }

  // Appends a MoveNode to the layout `dst`. If the value already has this layout, appends nothing and returns `value`.
  int move(int value, const Layout& dst);
  // Appends a product, with the schedule that choose_schedule() (product_choices.h) returns for the builder's request.
  // `inputs` and `outputs` are in the order that products/matmul.h documents. Throws UserError if the tensors of the
  // matmul do not match (check), or, with `is_request_binding`, if the product cannot meet the request.
  std::vector<int> multiply(Matmul matmul, std::vector<int> inputs, const std::vector<Value>& outputs,
                            bool is_request_binding = false);
  // Appends a BiasNode. The sum has the layout of `value`, whose mesh dims with pending sums the node takes.
  int add_bias(int value, int bias);
  // Appends a SumNode. `layout` is the layout of the sum.
  int sum_rows(int value, Layout layout);
  // Appends an AddNode. `a` and `b` must have equal layouts.
  int add(int a, int b);

  // Returns the list with these values (or kAbsent) as its outputs, and sets Node::released. The builder is then empty
  // and must not be used any more.
  Dataflow finish(std::vector<int> outputs);

 private:
  // Appends a node with these inputs and new values for its outputs. Returns the new values.
  std::vector<int> append(NodeOperation operation, std::vector<int> inputs, const std::vector<Value>& outputs);

  const MovePlanner& planner_;
  ScheduleRequest request_;
  Dataflow flow_;
};

}  // namespace shardwright
