// The plan of a product of placed tensors, forward and backward: the axes that are cut while it computes, the moves,
// the move that overlaps with the product, and the gradients.
//
// The cuts (product_layouts.h) determine the layouts of operand, weights and results while the product computes, and
// these determine what must be moved before and after it. One of the moves, the lead, goes in chunks and overlaps with
// the product (matmul.h): of the moves that can be chunked, the one that is predicted to take longest. The others are
// separate redistributes. The backward keeps the cuts. A gradient of a result that must be gathered is gathered once
// for both products that need it. Sums of the operand's gradient are scattered while their product runs. An operand
// that was gathered is gathered again while the product for the weight's gradient runs, unless it was kept.
//
// A plan is a function of the problem alone, whose context holds the tables and the pinned plans. So are its forward
// and each backward, whenever it is requested.
#pragma once

#include <string>
#include <vector>

#include "products/dataflow.h"
#include "products/product_layouts.h"

namespace shardwright {

enum class Lead : uint8_t { kOperand, kWeight, kResult };

const char* lead_name(Lead lead);  // "operand", "weight" or "result"

// The inputs of a backward, and which gradients it computes.
struct GradientRequest {
  std::vector<Layout> given;  // layouts of the results' gradients
  bool operand = true;
  std::vector<bool> weights;  // by weight
  std::vector<bool> biases;   // by weight; false where there is no bias
  // The layout of a gradient that is added to the operand's, if there is one. It is the gradient of another use of the
  // operand.
  std::optional<Layout> addend = std::nullopt;

  bool operator==(const GradientRequest&) const = default;
};

class ProductPlan {
 public:
  // Chooses cuts and lead, and plans the forward. Throws UserError if the problem is inconsistent (check), if a move is
  // one that PyTorch does not define, and if the requested schedule is not possible.
  ProductPlan(ProductProblem problem, PlanCache& cache);

  const ProductProblem& problem() const { return problem_; }
  const AxisCuts& cuts() const { return cuts_; }
  Lead lead() const { return lead_; }
  // The layouts while the product computes.
  const ProductLayouts& layouts() const { return layouts_; }
  // True if the forward also returns the moved operand, which the backward then takes as its input.
  bool keeps_gathered() const;

  // Inputs: the operand, the weights, the biases of those weights that have one, the scales of operand and weights.
  // Outputs: the results, then the moved operand if it is kept.
  const Dataflow& forward() const { return forward_; }

  // Inputs: the operand (the moved one if it is kept), the weights, the gradients of the results, then the addend if
  // there is one. Outputs: the gradient of the operand (in GradientLayouts::operand_out), then of each weight, then of
  // each bias, in the layouts of weights and biases with R for pending sums. There is an output for every weight and
  // bias, kAbsent if its gradient was not requested. Throws UserError for scaled products, which have no gradients, and
  // if the request does not match the problem.
  Dataflow backward(const GradientRequest& request, PlanCache& cache) const;

  // Returns a request for every gradient, with the gradients of results in the layouts of the results (R for pending
  // sums).
  GradientRequest all_gradients() const;

  // Returns the layout of the row scales of the operand (0) or of a weight (1, ...) whose layout is `layout`.
  Layout rows_of(size_t operand, const Layout& layout) const;

  std::string to_string(PlanCache& cache) const;
  std::string to_json(PlanCache& cache) const;

 private:
  class Forward;
  class Backward;

  bool fuses_bias(size_t j) const;
  Layout bias_layout(size_t j) const;
  std::optional<Scaling> scaling_of(Lead lead, const MovePlanner& planner) const;
  Lead choose_lead(const MovePlanner& planner) const;
  Matmul forward_matmul(Lead lead, const MovePlanner& planner) const;
  Dataflow plan_forward(const MovePlanner& planner) const;

  ProductProblem problem_;
  std::vector<AxisLetters> letters_;  // by weight
  AxisCuts cuts_;
  ProductLayouts layouts_;
  Lead lead_ = Lead::kOperand;
  Dataflow forward_;
};

}  // namespace shardwright
