// A product's operations as data: a list of nodes, executed one after the other and the same on every rank.
//
// Values are numbered and written once; the first ones are the inputs. Nodes read values and write new ones.
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

// A tensor that nodes read and write.
struct Value {
  std::string name;
  Layout layout;
};

// A separate redistribute.
struct MoveNode {
  Plan plan;
};

// A program that holds products; inputs and outputs are those of its Matmul (products/matmul.h).
struct MatmulNode {
  Matmul matmul;
  Schedule schedule;
};

// Adds a bias. Inputs: a tensor, and a bias along its last dim. Sums of the tensor are pending along the mesh dims
// `pending`, so only the first rank along them adds the bias. On other ranks the output is the first input.
struct BiasNode {
  MeshDimSet pending;
};

// The sum over all dims but the last, for the gradient of a bias.
struct SumNode {};

// The sum of two tensors of the same layout.
struct AddNode {};

using NodeOperation = std::variant<MoveNode, MatmulNode, BiasNode, SumNode, AddNode>;

struct Node {
  NodeOperation operation;
  std::vector<int> inputs;
  std::vector<int> outputs;
  // Values that the executor frees after this node: no later node reads them, and they are not outputs of the list.
  std::vector<int> released;
};

struct Dataflow {
  static constexpr int kAbsent = -1;

  std::vector<Value> values;
  int num_inputs = 0;
  std::vector<Node> nodes;
  // Values, or kAbsent for outputs that were not requested.
  std::vector<int> outputs;
};

// True if the rank at this position of the mesh adds the bias.
bool adds_bias(const BiasNode& node, const Mesh& mesh, int64_t position);

// Return the predicted time of the slowest rank, for all nodes or for one node. Moves take the time that their plans
// predict, products the time of their schedule's timeline (timeline.h), and other nodes the time to read and write
// their values in memory.
int64_t predicted_picoseconds(const Dataflow& flow, const ProductContext& context);
int64_t predicted_picoseconds(const Dataflow& flow, const Node& node, const ProductContext& context);

// Returns "move", "matmul", "bias", "sum" or "add".
const char* kind_name(const NodeOperation& operation);

// Returns one line per node, each beginning with `indent`.
std::string to_string(const Dataflow& flow, const ProductContext& context, const std::string& indent = "");

// Builds a list: first its inputs, then node by node. Functions return the values that the new input or node writes.
class DataflowBuilder {
 public:
  DataflowBuilder(const MovePlanner& planner, ScheduleRequest request)
      : planner_(planner), request_(std::move(request)) {}

  int input(std::string name, Layout layout);
  const Layout& layout(int value) const { return flow_.values[value].layout; }

  // Appends no node, and returns `value`, if the value already has this layout.
  int move(int value, const Layout& dst);
  // Appends a product, with the schedule that choose_schedule() (product_choices.h) returns.
  std::vector<int> multiply(Matmul matmul, std::vector<int> inputs, const std::vector<Value>& outputs,
                            bool is_request_binding = false);
  int add_bias(int value, int bias);
  // Appends a SumNode. `layout` is the layout of the sum.
  int sum_rows(int value, Layout layout);
  int add(int a, int b);

  // Returns the list with these values as its outputs, and sets Node::released.
  Dataflow finish(std::vector<int> outputs);

 private:
  std::vector<int> append(NodeOperation operation, std::vector<int> inputs, const std::vector<Value>& outputs);

  const MovePlanner& planner_;
  ScheduleRequest request_;
  Dataflow flow_;
};

}  // namespace shardwright
