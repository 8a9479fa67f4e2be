// Plans the backward of a product.
#include <algorithm>

#include "products/product_plan.h"
#include "support/error.h"

namespace shardwright {

// Builds one backward, in execution order: gradients of biases; gradients whose products share one gather of the
// result's gradient; then the gradients of the operand and the weights that are not computed yet.
class ProductPlan::Backward {
 public:
  Backward(const ProductPlan& plan, const GradientRequest& request, const MovePlanner& planner)
      : plan_(plan),
        problem_(plan.problem_),
        layouts_(*plan.layouts_.gradients),
        request_(request),
        planner_(planner),
        flow_(planner, problem_.schedule),
        count_(problem_.weights.size()),
        operand_is_in_place_(plan.keeps_gathered() || problem_.operand == plan.layouts_.operand),
        weight_gradients_(count_, Dataflow::kAbsent) {
    operand_ = flow_.input("x", plan.keeps_gathered() ? plan.layouts_.operand : problem_.operand);
    for (size_t j = 0; j < count_; ++j) weights_.push_back(flow_.input(name("w", j), problem_.weights[j]));
    for (size_t j = 0; j < count_; ++j) gradients_.push_back(flow_.input(name("dy", j), request.given[j]));
    if (request.addend) addend_ = flow_.input("added", *request.addend);
  }

  Dataflow build() {
    if (addend_ != Dataflow::kAbsent) addend_ = flow_.move(addend_, layouts_.operand);
    std::vector<int> bias_gradients;
    for (size_t j = 0; j < count_; ++j) {
      bias_gradients.push_back(request_.biases[j] ? bias_gradient(j) : Dataflow::kAbsent);
    }
    if (gathers_gradient()) {
      gather_gradient();
    } else {
      for (size_t j = 0; j < count_; ++j) gradients_[j] = flow_.move(gradients_[j], layouts_.results[j]);
    }
    if (request_.operand && operand_gradient_ == Dataflow::kAbsent) operand_gradient_ = operand_gradient();
    add_missing_weight_gradients();
    std::vector<int> outputs{operand_gradient_};
    outputs.insert(outputs.end(), weight_gradients_.begin(), weight_gradients_.end());
    outputs.insert(outputs.end(), bias_gradients.begin(), bias_gradients.end());
    return flow_.finish(std::move(outputs));
  }

 private:
  using Products = std::vector<GatherMatmul::Product>;

  std::string name(const char* what, size_t j) const { return numbered(what, j, count_); }

  // Returns the contraction of the gradient of result j with weight j that gives the gradient of the operand:
  // "mn,kn->mk" for the forward "mk,kn->mn".
  Contraction to_operand(size_t j) const {
    const auto& [operand, weight, result] = plan_.letters_[j];
    return Contraction::parse(result + "," + weight + "->" + operand);
  }
  // Returns the contraction of the gradient of result j with the operand that gives the gradient of weight j:
  // "mn,mk->kn" for the forward "mk,kn->mn".
  Contraction to_weight(size_t j) const {
    const auto& [operand, weight, result] = plan_.letters_[j];
    return Contraction::parse(result + "," + operand + "->" + weight);
  }
  // Returns the contraction of to_weight with the operand first.
  Contraction to_weight_from_operand(size_t j) const {
    const auto& [operand, weight, result] = plan_.letters_[j];
    return Contraction::parse(operand + "," + result + "->" + weight);
  }

  // Moves the gradient of weight j to the layout in which the backward returns it. Returns the moved value.
  int move_weight_gradient(size_t j, int gradient) { return flow_.move(gradient, without_sums(problem_.weights[j])); }

  // Appends the gradient of bias j: the sum of the gradient of result j over all dims but the last. Each rank sums its
  // part, so mesh dims that shard a summed dim leave a pending sum, which is then moved to the layout of the bias.
  int bias_gradient(size_t j) {
    int dy = gradients_[j];
    const std::vector<Placement>& dy_placements = flow_.layout(dy).placements();
    const bool can_sum = std::all_of(dy_placements.begin(), dy_placements.end(), [](const Placement& p) {
      return p.is_replicate() || p.kind == PlacementKind::kShard;
    });
    if (!can_sum) dy = flow_.move(dy, layouts_.results[j]);
    const Layout layout = flow_.layout(dy);
    const int last = layout.ndim() - 1;
    const Layout last_dim = with_dims(layout, {last}, layout.dtype());
    std::vector<Placement> placements = last_dim.placements();
    for (size_t d = 0; d < placements.size(); ++d) {
      const Placement& placement = layout.placements()[d];
      if (placement.is_shard_like() && placement.dim != last) placements[d] = Placement::partial(ReduceOp::kSum);
    }
    const int sum = flow_.sum_rows(dy, with_placements(last_dim, std::move(placements)));
    return flow_.move(sum, without_sums(*problem_.biases[j]));
  }

  // Returns true if there is only one result, and its gradient must move and can be gathered in chunks while a product
  // that needs it runs.
  bool gathers_gradient() const {
    const Layout& gradient = request_.given[0];
    if (count_ != 1 || gradient == layouts_.results[0] || !(request_.operand || request_.weights[0])) return false;
    const GatherMatmul gather{planner_.plan(gradient, layouts_.results[0]),
                              {{to_operand(0), plan_.layouts_.weights[0]}}};
    check(Matmul(gather), {});
    return !why_only_serial(gather);
  }

  // Gathers the result's gradient in chunks, while the operand's gradient is computed from it, and the weight's
  // gradient too if the operand is in place. Otherwise the gathered gradient is kept for the weight's gradient.
  // Computes requested gradients only.
  void gather_gradient() {
    const bool serves_weight = request_.weights[0] && operand_is_in_place_;
    const bool keeps = request_.weights[0] && !operand_is_in_place_;
    GatherMatmul gather{planner_.plan(request_.given[0], layouts_.results[0]), {}, keeps};
    std::vector<int> inputs{gradients_[0]};
    std::vector<Value> outputs;
    if (request_.operand) {
      gather.products.push_back({to_operand(0), plan_.layouts_.weights[0]});
      inputs.push_back(flow_.move(weights_[0], plan_.layouts_.weights[0]));
      outputs.push_back({"dx", layouts_.operand});
    }
    if (serves_weight) {
      gather.products.push_back({to_weight(0), plan_.layouts_.operand});
      inputs.push_back(operand_);
      outputs.push_back({"dw", layouts_.weights[0]});
    }
    if (keeps) outputs.push_back({"dy'", layouts_.results[0]});
    if (gather.products.empty()) {
      gradients_[0] = flow_.move(gradients_[0], layouts_.results[0]);
      return;
    }
    std::vector<int> values = flow_.multiply(std::move(gather), std::move(inputs), outputs);
    if (keeps) gradients_[0] = values.back();
    if (serves_weight) weight_gradients_[0] = move_weight_gradient(0, values.back());
    if (!request_.operand) return;
    const int sum = addend_ == Dataflow::kAbsent ? values[0] : flow_.add(values[0], addend_);
    operand_gradient_ = flow_.move(sum, layouts_.operand_out);
  }

  // Appends the gradient of the operand. Its product overlaps with the move of the weight if only the weight must move
  // and there is no addend, else with the move of the gradient itself.
  int operand_gradient() {
    const Layout& target = layouts_.operand_out;
    const bool weight_is_in_place = problem_.weights[0] == plan_.layouts_.weights[0];
    if (count_ == 1 && !weight_is_in_place && layouts_.operand == target && addend_ == Dataflow::kAbsent) {
      const auto& [operand, weight, result] = plan_.letters_[0];
      const Contraction axes = Contraction::parse(weight + "," + result + "->" + operand);
      GatherMatmul gather{planner_.plan(problem_.weights[0], plan_.layouts_.weights[0]), {{axes, layouts_.results[0]}}};
      return flow_.multiply(std::move(gather), {weights_[0], gradients_[0]}, {{"dx", layouts_.operand}})[0];
    }
    MatmulScatter scatter{planner_.plan(layouts_.operand, target), {}, addend_ != Dataflow::kAbsent};
    std::vector<int> inputs;
    for (size_t j = 0; j < count_; ++j) {
      const Layout& weight = plan_.layouts_.weights[j];
      inputs.insert(inputs.end(), {gradients_[j], flow_.move(weights_[j], weight)});
      scatter.terms.push_back({to_operand(j), layouts_.results[j], weight});
    }
    if (addend_ != Dataflow::kAbsent) inputs.push_back(addend_);
    return flow_.multiply(std::move(scatter), std::move(inputs), {{"dx", target}})[0];
  }

  // Appends the requested weight gradients that gather_gradient did not append. If the operand is in place, each
  // product overlaps with the move of its result; otherwise all products share the gather of the operand.
  void add_missing_weight_gradients() {
    std::vector<size_t> missing;
    for (size_t j = 0; j < count_; ++j) {
      if (request_.weights[j] && weight_gradients_[j] == Dataflow::kAbsent) missing.push_back(j);
    }
    if (missing.empty()) return;
    if (operand_is_in_place_) {
      for (const size_t j : missing) {
        const Layout target = without_sums(problem_.weights[j]);
        MatmulScatter scatter{planner_.plan(layouts_.weights[j], target),
                              {{to_weight(j), layouts_.results[j], plan_.layouts_.operand}}};
        weight_gradients_[j] =
            flow_.multiply(std::move(scatter), {gradients_[j], operand_}, {{name("dw", j), target}})[0];
      }
      return;
    }
    GatherMatmul gather{planner_.plan(problem_.operand, plan_.layouts_.operand), {}};
    std::vector<int> inputs{operand_};
    std::vector<Value> outputs;
    for (const size_t j : missing) {
      gather.products.push_back({to_weight_from_operand(j), layouts_.results[j]});
      inputs.push_back(gradients_[j]);
      outputs.push_back({name("dw", j), layouts_.weights[j]});
    }
    const std::vector<int> values = flow_.multiply(std::move(gather), std::move(inputs), outputs);
    for (size_t i = 0; i < missing.size(); ++i) {
      weight_gradients_[missing[i]] = move_weight_gradient(missing[i], values[i]);
    }
  }

  const ProductPlan& plan_;
  const ProductProblem& problem_;
  const GradientLayouts& layouts_;
  const GradientRequest& request_;
  const MovePlanner& planner_;
  DataflowBuilder flow_;
  size_t count_;
  bool operand_is_in_place_;  // the operand is given, or was kept, in the layout that products need
  int operand_ = Dataflow::kAbsent;
  std::vector<int> weights_;
  std::vector<int> gradients_;  // of results; replaced once they are moved
  int addend_ = Dataflow::kAbsent;
  int operand_gradient_ = Dataflow::kAbsent;
  std::vector<int> weight_gradients_;
};

GradientRequest ProductPlan::all_gradients() const {
  GradientRequest request;
  for (size_t j = 0; j < problem_.weights.size(); ++j) {
    request.given.push_back(without_sums(problem_.results[j]));
    request.weights.push_back(true);
    request.biases.push_back(problem_.biases[j].has_value());
  }
  return request;
}

Dataflow ProductPlan::backward(const GradientRequest& request, PlanCache& cache) const {
  check_argument(layouts_.gradients.has_value(), "scaled_by", "empty for a product with gradients", "'",
                 scaled_by_name(problem_.scaled_by), "'");
  const size_t count = problem_.weights.size();
  check_user(request.given.size() == count && request.weights.size() == count && request.biases.size() == count,
             "gradients must have ", count, " entries for results, weights and biases each, got ", request.given.size(),
             ", ", request.weights.size(), " and ", request.biases.size());
  for (size_t j = 0; j < count; ++j) {
    check_user(!request.biases[j] || problem_.biases[j],
               "gradients must not request the gradient of a bias that the problem lacks, got the bias of weight ", j);
  }
  return Backward(*this, request, MovePlanner(problem_.context, cache)).build();
}

}  // namespace shardwright
