// A request for products of sharded tensors: one operand, one or several weights, and the layouts of all tensors.
//
// Axes are letters, as in einsum: "bsk,nk->bsn" is operand, weight and result of a linear layer. Weights share the
// operand and its letters; each may use its own letter for another size.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cost/gemm_model.h"
#include "layout/layout.h"
#include "planning/context.h"
#include "products/matmul.h"

namespace shardwright {

// The letters of each tensor in "bsk,nk->bsn".
struct AxisLetters {
  std::string operand;
  std::string weight;
  std::string result;

  // Splits "operand,weight->result". Throws UserError if the axes are invalid.
  static AxisLetters parse(const std::string& axes);
};

// By mesh dim: the letter of the axis that is sharded along it while the product is computed, or kNoAxis. With "b-n",
// mesh dim 0 shards axis b, mesh dim 1 no axis, mesh dim 2 axis n.
using AxisCuts = std::string;
constexpr char kNoAxis = '-';

// The scales of operands of 8-bit floats: none (other dtypes), one scale per operand, or one scale per row.
enum class ScaledBy : uint8_t { kNothing, kTensor, kRow };

const char* scaled_by_name(ScaledBy scaled_by);     // "", "tensor" or "row"
ScaledBy parse_scaled_by(const std::string& name);  // throws UserError

// Requirements for the schedules of programs with products. Fields that are not set or empty are chosen by predicted
// time.
struct ScheduleRequest {
  std::optional<Method> method = std::nullopt;
  std::optional<int64_t> chunks = std::nullopt;
  // The distances of each chunk of a ring, as in Schedule.
  std::vector<std::vector<int64_t>> distances = {};
  std::optional<int64_t> depth = std::nullopt;

  bool operator==(const ScheduleRequest&) const = default;
};

// The settings that moves and products are planned with. They must be the same on all ranks.
struct ProductContext {
  Lowering lowering = Lowering::kNccl;
  std::optional<Topology> topology = std::nullopt;
  // Plans to use instead of the plans that the search finds; null: none.
  PinsPtr pins = nullptr;
  // Models of the time that products take, by the name of the moved tensor's dtype.
  std::map<std::string, GemmModel> gemm_models = {};

  // Throws UserError if there is no model for the dtype.
  const GemmModel& gemm_model(const DType& dtype) const;

  // Returns `topology`, or the default of the lowering if it is not set.
  Topology known_topology() const;
};

struct ProductProblem {
  // For each weight: "operand,weight->result".
  std::vector<std::string> axes;
  Layout operand;
  std::vector<Layout> weights;
  // By weight; a bias has the result's last axis.
  std::vector<std::optional<Layout>> biases;
  // By weight: the layouts requested for the results.
  std::vector<Layout> results;
  // The default is the cuts with the least predicted time.
  std::optional<AxisCuts> cuts = std::nullopt;
  ScaledBy scaled_by = ScaledBy::kNothing;
  // Empty, or for scales by row: the layout of the operand's scales, then of each weight's. nullopt: the scales are
  // placed like the rows that they scale.
  std::vector<std::optional<Layout>> scales = {};
  // True if the gathered operand is kept for the backward.
  bool keeps_gathered = false;
  ScheduleRequest schedule = {};
  ProductContext context = {};
};

// Throw UserError if a field is invalid. Distances are checked with the product (check in matmul.h).
void check(const ScheduleRequest& request);
void check(const ProductProblem& problem);

}  // namespace shardwright
