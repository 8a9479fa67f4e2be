#include "products/product_plan.h"

#include <algorithm>

#include "moves/step_counts.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr const char* kLeadNames[] = {"operand", "weight", "result"};

}  // namespace

const char* lead_name(Lead lead) { return kLeadNames[static_cast<int>(lead)]; }

std::string numbered(const char* name, size_t index, size_t num_products) {
  return num_products == 1 ? name : concat(name, index);
}

ProductPlan::ProductPlan(ProductProblem problem, PlanCache& cache)
    : problem_(std::move(problem)), layouts_{problem_.operand, {}, {}} {
  check(problem_);
  for (const std::string& axes : problem_.axes) letters_.push_back(AxisLetters::parse(axes));
  const MovePlanner planner(problem_.context, cache);
  cuts_ = problem_.cuts ? *problem_.cuts : choose_cuts(problem_, planner);
  layouts_ = lay_out(problem_, cuts_);
  lead_ = choose_lead(planner);
  forward_ = plan_forward(planner);
}

Layout ProductPlan::row_scales_layout(size_t tensor, const Layout& layout) const {
  const AxisLetters& letters = letters_[tensor == 0 ? 0 : tensor - 1];
  const std::string& tensor_letters = tensor == 0 ? letters.operand : letters.weight;
  std::vector<int> free_dims;
  for (size_t d = 0; d < tensor_letters.size(); ++d) {
    if (letters.result.find(tensor_letters[d]) != std::string::npos) free_dims.push_back(static_cast<int>(d));
  }
  return with_dims(layout, free_dims, DType::kFloat32);
}

bool ProductPlan::keeps_gathered() const {
  return problem_.keeps_gathered && problem_.scaled_by == ScaledBy::kNothing && lead_ == Lead::kOperand &&
         !(problem_.operand == layouts_.operand);
}

// A bias is not fused where sums are pending, because every rank would add it, nor into scaled products.
bool ProductPlan::fuses_bias(size_t j) const {
  const std::vector<Placement>& placements = layouts_.results[j].placements();
  return problem_.biases[j] && problem_.scaled_by == ScaledBy::kNothing && lead_ != Lead::kResult &&
         std::none_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_partial(); });
}

// A bias is sharded like the last dim of the tensor that it is added to.
Layout ProductPlan::bias_layout(size_t j) const {
  const Layout& result = fuses_bias(j) ? layouts_.results[j] : problem_.results[j];
  return without_sums(with_dims(result, {result.ndim() - 1}, result.dtype()));
}

std::optional<Scaling> ProductPlan::scaling_of(Lead lead, const MovePlanner& planner) const {
  if (problem_.scaled_by == ScaledBy::kNothing) return std::nullopt;
  const bool by_row = problem_.scaled_by == ScaledBy::kRow;
  Scaling scaling{by_row, problem_.results[0].dtype()};
  if (by_row && lead == Lead::kOperand) {
    scaling.plan = planner.plan(row_scales_layout(0, problem_.operand), row_scales_layout(0, layouts_.operand));
  } else if (by_row && lead == Lead::kWeight) {
    scaling.plan = planner.plan(row_scales_layout(1, problem_.weights[0]), row_scales_layout(1, layouts_.weights[0]));
  }
  return scaling;
}

Matmul ProductPlan::forward_matmul(Lead lead, const MovePlanner& planner) const {
  const auto& [operand, weight, result] = letters_[0];
  if (lead == Lead::kResult) {
    MatmulScatter scatter{planner.plan(layouts_.results[0], problem_.results[0]), {}};
    scatter.terms.push_back({Contraction::parse(problem_.axes[0]), layouts_.operand, layouts_.weights[0]});
    scatter.scaling = scaling_of(lead, planner);
    return scatter;
  }
  if (lead == Lead::kWeight) {
    GatherMatmul gather{planner.plan(problem_.weights[0], layouts_.weights[0]), {}};
    const Contraction swapped = Contraction::parse(weight + "," + operand + "->" + result);
    gather.products.push_back({swapped, layouts_.operand, fuses_bias(0)});
    gather.scaling = scaling_of(lead, planner);
    return gather;
  }
  GatherMatmul gather{planner.plan(problem_.operand, layouts_.operand), {}, keeps_gathered()};
  for (size_t j = 0; j < letters_.size(); ++j) {
    gather.products.push_back({Contraction::parse(problem_.axes[j]), layouts_.weights[j], fuses_bias(j)});
  }
  gather.scaling = scaling_of(lead, planner);
  return gather;
}

// Returns the tensor whose move is predicted to take longest among the moves that can be chunked. If predictions are
// equal, it prefers the weight, then the result. With several weights, the operand is the only candidate, because all
// products share its move. Returns kOperand if no move can be chunked.
Lead ProductPlan::choose_lead(const MovePlanner& planner) const {
  std::optional<std::pair<int64_t, Lead>> best;
  for (const Lead lead : {Lead::kOperand, Lead::kResult, Lead::kWeight}) {
    if (lead != Lead::kOperand && letters_.size() > 1) continue;
    const Matmul matmul = forward_matmul(lead, planner);
    check(matmul, {});
    if (why_only_serial(matmul)) continue;
    const int64_t predicted = predicted_picoseconds(plan_of(matmul));
    if (!best || predicted >= best->first) best = {predicted, lead};
  }
  return best ? best->second : Lead::kOperand;
}

// Builds the forward, in execution order.
class ProductPlan::Forward {
 public:
  Forward(const ProductPlan& plan, const MovePlanner& planner)
      : plan_(plan), problem_(plan.problem_), flow_(planner, problem_.schedule), planner_(planner) {
    const size_t count = problem_.weights.size();
    operand_ = flow_.input("x", problem_.operand);
    for (size_t j = 0; j < count; ++j) weights_.push_back(flow_.input(numbered("w", j, count), problem_.weights[j]));
    for (size_t j = 0; j < count; ++j) {
      const auto& bias = problem_.biases[j];
      biases_.push_back(bias ? flow_.input(numbered("b", j, count), *bias) : Dataflow::kAbsent);
    }
    if (problem_.scaled_by == ScaledBy::kNothing) return;
    for (size_t i = 0; i <= count; ++i) {
      const std::string name = "scale " + flow_name(i);
      scales_.push_back(flow_.input(name, scale_layout(i)));
    }
  }

  Dataflow build() {
    move_scales_to_given_rows();
    for (size_t j = 0; j < biases_.size(); ++j) {
      if (biases_[j] != Dataflow::kAbsent) biases_[j] = flow_.move(biases_[j], plan_.bias_layout(j));
    }
    if (plan_.lead_ != Lead::kOperand) operand_ = flow_.move(operand_, plan_.layouts_.operand);
    for (size_t j = 0; j < weights_.size() && plan_.lead_ != Lead::kWeight; ++j) {
      weights_[j] = flow_.move(weights_[j], plan_.layouts_.weights[j]);
    }
    move_scales_to_computed_rows();
    std::vector<int> outputs = multiply();
    for (size_t j = 0; j < weights_.size(); ++j) {
      outputs[j] = flow_.move(outputs[j], problem_.results[j]);
    }
    for (size_t j = 0; j < weights_.size(); ++j) {
      if (biases_[j] != Dataflow::kAbsent && !plan_.fuses_bias(j)) outputs[j] = flow_.add_bias(outputs[j], biases_[j]);
    }
    return flow_.finish(std::move(outputs));
  }

 private:
  // Return the layout of tensor i as given and while the product computes, and its name. Tensor 0 is the operand;
  // tensors 1 and more are the weights.
  const Layout& given(size_t i) const { return i == 0 ? problem_.operand : problem_.weights[i - 1]; }
  const Layout& during(size_t i) const { return i == 0 ? plan_.layouts_.operand : plan_.layouts_.weights[i - 1]; }
  std::string flow_name(size_t i) const { return i == 0 ? "x" : numbered("w", i - 1, problem_.weights.size()); }

  // Returns the layout in which the scales of tensor i are given.
  Layout scale_layout(size_t i) const {
    if (problem_.scaled_by == ScaledBy::kTensor) return with_dims(given(i), {}, DType::kFloat32);
    if (i < problem_.scales.size() && problem_.scales[i]) return *problem_.scales[i];
    return plan_.row_scales_layout(i, given(i));
  }

  // Moves row scales to the layouts that match their tensors as given.
  void move_scales_to_given_rows() {
    if (problem_.scaled_by != ScaledBy::kRow) return;
    for (size_t i = 0; i < scales_.size(); ++i)
      scales_[i] = flow_.move(scales_[i], plan_.row_scales_layout(i, given(i)));
  }

  // Moves row scales to the layouts that match their tensors while the product computes. The product itself moves the
  // scales of the lead.
  void move_scales_to_computed_rows() {
    if (problem_.scaled_by != ScaledBy::kRow) return;
    for (size_t i = 0; i < scales_.size(); ++i) {
      const bool is_lead = (plan_.lead_ == Lead::kOperand && i == 0) || (plan_.lead_ == Lead::kWeight && i == 1);
      if (!is_lead) scales_[i] = flow_.move(scales_[i], plan_.row_scales_layout(i, during(i)));
    }
  }

  // Appends the product and returns its outputs.
  std::vector<int> multiply() {
    const Lead lead = plan_.lead_;
    std::vector<int> inputs{operand_};
    inputs.insert(inputs.end(), weights_.begin(), weights_.end());
    if (lead == Lead::kWeight) std::swap(inputs[0], inputs[1]);
    std::vector<Value> outputs;
    for (size_t j = 0; j < weights_.size(); ++j) {
      if (plan_.fuses_bias(j)) inputs.push_back(biases_[j]);
      outputs.push_back(
          {numbered("y", j, weights_.size()), lead == Lead::kResult ? problem_.results[j] : plan_.layouts_.results[j]});
    }
    if (lead == Lead::kWeight) std::reverse(scales_.begin(), scales_.end());
    inputs.insert(inputs.end(), scales_.begin(), scales_.end());
    if (plan_.keeps_gathered()) outputs.push_back({"x'", plan_.layouts_.operand});
    const ScheduleRequest& request = problem_.schedule;
    const bool is_request_binding = request.method || request.chunks || !request.distances.empty();
    return flow_.multiply(plan_.forward_matmul(lead, planner_), std::move(inputs), outputs, is_request_binding);
  }

  const ProductPlan& plan_;
  const ProductProblem& problem_;
  DataflowBuilder flow_;
  const MovePlanner& planner_;
  int operand_ = Dataflow::kAbsent;
  std::vector<int> weights_;
  std::vector<int> biases_;
  std::vector<int> scales_;
};

Dataflow ProductPlan::plan_forward(const MovePlanner& planner) const { return Forward(*this, planner).build(); }

}  // namespace shardwright
