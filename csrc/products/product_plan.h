// How a product of placed tensors is carried out, forward and backward: what is cut meanwhile, what is moved, which of
// the moves goes in chunks behind the product itself, and how gradients go back.
//
// From the cuts (product_layouts.h) follow the layouts that operand, weights and results have while the product
// computes, and from these what must be moved before and after. One of the moves, the lead, is done in chunks behind
// the product (matmul.h): the one that is predicted to take longest, of those that can. The others are redistributes of
// their own. The backward keeps the cuts: a gradient of a result that must be gathered is gathered once for both
// products that need it, sums of the operand's gradient are scattered behind their product, and an operand that was
// gathered is gathered again behind the product for a weight's gradient, unless it was kept.
//
// A plan is a function of the problem alone, whose context holds the tables and what is pinned: so are its forward and
// every backward, whenever it is asked for.
#pragma once

#include <string>
#include <vector>

#include "products/dataflow.h"
#include "products/product_layouts.h"

namespace shardwright {

enum class Lead : uint8_t { kOperand, kWeight, kResult };

const char* lead_name(Lead lead);  // "operand", "weight" or "result"

// What a backward is to give, and what it is given.
struct GradientRequest {
  std::vector<Layout> given;  // of the results' gradients
  bool operand = true;
  std::vector<bool> weights;  // by weight
  std::vector<bool> biases;   // by weight; false where there is none
  // Where a part of the operand's gradient from elsewhere lies, if there is one to be added.
  std::optional<Layout> addend = std::nullopt;

  bool operator==(const GradientRequest&) const = default;
};

class ProductPlan {
 public:
  // Chooses cuts and lead, and plans the forward. Throws UserError on a problem that does not fit together (check), on
  // moves that PyTorch does not define, and on a schedule that was asked for and cannot be had.
  ProductPlan(ProductProblem problem, PlanCache& cache);

  const ProductProblem& problem() const { return problem_; }
  const AxisCuts& cuts() const { return cuts_; }
  Lead lead() const { return lead_; }
  // While the product computes.
  const ProductLayouts& layouts() const { return layouts_; }
  // Whether the forward gives the operand as moved, and the backward takes it so.
  bool keeps_gathered() const;

  // Inputs: the operand, weights, biases (of those weights that have one), scales of operand and weights. Outputs: the
  // results, then the operand as moved if it is kept.
  const Dataflow& forward() const { return forward_; }

  // Inputs: the operand (as moved if it is kept), weights, the gradients of the results, then what is added to the
  // operand's gradient. Outputs: the gradients of operand (as GradientLayouts::operand_out), weights and biases (as
  // those, with R for sums that are due; absent ones too), kAbsent where they were not asked for. Throws UserError for
  // scaled products, which have none, and where the request does not fit.
  Dataflow backward(const GradientRequest& request, PlanCache& cache) const;

  // Everything asked for, gradients given as the results lie.
  GradientRequest all_gradients() const;

  // Where scales of the rows of the operand (0) or a weight (1, ...) lie, if that lies as `layout`.
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
