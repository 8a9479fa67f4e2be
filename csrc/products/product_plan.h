// The plan of a product of sharded tensors, forward and backward: the axes that are cut while it computes, the moves,
// the move that overlaps with the product, and the gradients.
//
// The cuts (product_layouts.h) determine the layouts of operand, weights and results while the product computes. These
// layouts determine the moves before and after the product. Of the moves that can be chunked, the one that takes
// longest is chunked and overlaps with the product (matmul.h); the tensor that it moves is the *lead*. The other moves
// are separate redistributes.
//
// The backward keeps the cuts. If the gradient of a result must be gathered, it is gathered once for both products that
// need it. Sums of the operand's gradient are scattered while their product runs. If the forward gathered the operand,
// the operand is gathered again while the product for the weight's gradient runs, unless the gathered operand was kept.
//
//   "mk,kn->mn" over 4 ranks, x [S(0)], w [S(1)], y [S(1)]: the cut is n, and the lead is x, whose rows are gathered.
//     forward    y = move x to [R], times w
//     backward   dx = dy times w, move it to [S(0)]
//                dw = move x to [R], times dy
//
// A plan depends only on the problem, whose context holds the tables and the pinned plans.
#pragma once

#include <string>
#include <vector>

#include "products/dataflow.h"
#include "products/product_layouts.h"

namespace shardwright {

// The tensor whose move is chunked and overlaps with the product.
enum class Lead : uint8_t { kOperand, kWeight, kResult };

const char* lead_name(Lead lead);  // "operand", "weight" or "result"

// Returns the name of a tensor of product `index`: `name` if there is only one product, else with the index: "w1".
std::string numbered(const char* name, size_t index, size_t num_products);

// The inputs of a backward, and the gradients that it computes.
struct GradientRequest {
  std::vector<Layout> given;  // by weight: the layout of the result's gradient
  bool operand = true;        // true if the gradient of the operand is computed
  std::vector<bool> weights;  // by weight: true if its gradient is computed
  std::vector<bool> biases;   // by weight: true if its bias's gradient is computed; false where there is no bias
  // The layout of a gradient that is added to the operand's, if there is one: the gradient from another use of the
  // operand.
  std::optional<Layout> addend = std::nullopt;

  bool operator==(const GradientRequest&) const = default;
};

class ProductPlan {
 public:
  // Chooses cuts and lead, and plans the forward. Throws UserError if the problem is inconsistent (check), if PyTorch
  // does not define one of the moves, if the context lacks a GEMM model, or if the requested schedule is not possible.
  ProductPlan(ProductProblem problem, PlanCache& cache);

  const ProductProblem& problem() const { return problem_; }
  const AxisCuts& cuts() const { return cuts_; }
  Lead lead() const { return lead_; }
  // The layouts while the product computes.
  const ProductLayouts& layouts() const { return layouts_; }
  // Returns true if the forward also returns the gathered operand, which the backward then takes instead of the
  // operand: if the problem asks for it and has no scales, and the operand is the lead and must move.
  bool keeps_gathered() const;

  // Inputs: the operand, the weights, the biases that exist, the scales of operand and weights. Outputs: the results,
  // then the gathered operand if it is kept.
  const Dataflow& forward() const { return forward_; }

  // Returns the list that computes the requested gradients. Inputs: the operand (the gathered one if it is kept), the
  // weights, the gradients of the results, then the addend if there is one. Outputs: the gradient of the operand (in
  // GradientLayouts::operand_out), then of each weight, then of each bias, in the layouts of weights and biases with R
  // for pending sums. Outputs that were not requested are kAbsent. Throws UserError for scaled products, which have no
  // gradients, and if the request does not match the problem.
  Dataflow backward(const GradientRequest& request, PlanCache& cache) const;

  // Returns a request for every gradient, with the gradients of results in the layouts of the results (R for pending
  // sums).
  GradientRequest all_gradients() const;

  // Returns the layout of a tensor's row scales, sharded like its rows. The tensor is the operand (0) or a weight (1
  // and more), in the layout `layout`.
  Layout row_scales_layout(size_t tensor, const Layout& layout) const;

  // Return the layouts, the forward, and the backward with all gradients, as text and as JSON. Scaled products have no
  // backward.
  std::string to_string(PlanCache& cache) const;
  std::string to_json(PlanCache& cache) const;

 private:
  class Forward;
  class Backward;

  // Returns true if the forward's product adds bias j itself; otherwise a BiasNode adds it.
  bool fuses_bias(size_t j) const;
  Layout bias_layout(size_t j) const;  // of bias j when it is added
  // Returns the scaling that the forward's Matmul has with this lead; nullopt for products without scales.
  std::optional<Scaling> scaling_of(Lead lead, const MovePlanner& planner) const;
  // Returns the Matmul that the forward has with this lead, which must be kOperand if there are several weights.
  Matmul forward_matmul(Lead lead, const MovePlanner& planner) const;
  Lead choose_lead(const MovePlanner& planner) const;
  Dataflow plan_forward(const MovePlanner& planner) const;

  ProductProblem problem_;
  std::vector<AxisLetters> letters_;  // by weight
  AxisCuts cuts_;
  ProductLayouts layouts_;
  Lead lead_ = Lead::kOperand;
  Dataflow forward_;
};

}  // namespace shardwright
