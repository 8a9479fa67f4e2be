// What is done with the tensors of a product, one thing after the other, as data: the same list on every rank.
//
// Values are numbered, each written once; the first are the inputs. Nodes read values and write new ones.
//
//   x, w, b          inputs
//   0. b' = move b to [S(0)]
//   1. y = gather x to [R, R], times w, plus b'
//
// Whoever runs a list (the Python package, a test) goes through its nodes in order and lets go of what is released.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "products/product_choices.h"

namespace shardwright {

struct Value {
  std::string name;
  Layout layout;
};

// A redistribute of its own.
struct MoveNode {
  Plan plan;
};

// A program that holds products; inputs and outputs are those of its Matmul (products/matmul.h).
struct MatmulNode {
  Matmul matmul;
  Schedule schedule;
};

// Inputs: a tensor, and a bias along its last dim. Along these mesh dims sums stay due: only the first rank adds it, on
// others the output is the first input.
struct BiasNode {
  MeshDimSet pending;
};

// The sum over all dims but the last, in front of a bias's gradient.
struct SumNode {};

// The sum of two tensors that lie alike.
struct AddNode {};

using NodeOperation = std::variant<MoveNode, MatmulNode, BiasNode, SumNode, AddNode>;

struct Node {
  NodeOperation operation;
  std::vector<int> inputs;
  std::vector<int> outputs;
  // Values that nobody reads any more afterwards, and that are no outputs of the list.
  std::vector<int> released;
};

struct Dataflow {
  static constexpr int kAbsent = -1;

  std::vector<Value> values;
  int num_inputs = 0;
  std::vector<Node> nodes;
  // Values; kAbsent for what was not asked for.
  std::vector<int> outputs;
};

// Whether the rank at `position` adds the bias.
bool adds_bias(const BiasNode& node, const Mesh& mesh, int64_t position);

// Picoseconds that the worst rank is predicted to need: moves by their plans, products by the timeline of their
// schedules, the rest by what it reads and writes in memory.
int64_t predicted_picoseconds(const Dataflow& flow, const ProductContext& context);
int64_t predicted_picoseconds(const Dataflow& flow, const Node& node, const ProductContext& context);

// "move", "matmul", "bias", "sum" or "add".
const char* kind_name(const NodeOperation& operation);

// A line per node. `indent` stands in front of each.
std::string to_string(const Dataflow& flow, const ProductContext& context, const std::string& indent = "");

// Writes a list, value by value.
class DataflowBuilder {
 public:
  DataflowBuilder(const MovePlanner& planner, ScheduleRequest request)
      : planner_(planner), request_(std::move(request)) {}

  int input(std::string name, Layout layout);
  const Layout& layout(int value) const { return flow_.values[value].layout; }

  // The value itself where it lies so already.
  int move(int value, const Layout& dst);
  // With `must`, a schedule that was asked for and cannot be had throws UserError.
  std::vector<int> multiply(Matmul matmul, std::vector<int> inputs, const std::vector<Value>& outputs,
                            bool must = false);
  int add_bias(int value, int bias);
  // `layout`: where the sum lies.
  int sum_rows(int value, Layout layout);
  int add(int a, int b);

  // The list that gives these.
  Dataflow finish(std::vector<int> outputs);

 private:
  std::vector<int> append(NodeOperation operation, std::vector<int> inputs, const std::vector<Value>& outputs);

  const MovePlanner& planner_;
  ScheduleRequest request_;
  Dataflow flow_;
};

}  // namespace shardwright
