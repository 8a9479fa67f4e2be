// A product of placed tensors as it is asked for: one operand, one or several weights, and where everything lies.
//
// Axes are letters, as in einsum: "bsk,nk->bsn" is operand, weight and result of a linear layer. Weights share the
// operand and its letters; each may use a letter of its own for another size.
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

// The letters of "bsk,nk->bsn", tensor by tensor.
struct AxisLetters {
  std::string operand;
  std::string weight;
  std::string result;

  // Throws UserError as Contraction::parse does.
  static AxisLetters parse(const std::string& axes);
};

// By mesh dim, the axis that is cut along it while the product is computed; kNoAxis where none is. "b-n"
using AxisCuts = std::string;
constexpr char kNoAxis = '-';

// Operands of 8-bit floats are multiplied by one scale each, or by one for each row.
enum class ScaledBy : uint8_t { kNothing, kTensor, kRow };

const char* scaled_by_name(ScaledBy scaled_by);     // "", "tensor" or "row"
ScaledBy parse_scaled_by(const std::string& name);  // throws UserError

// What is asked of the programs that hold products. What is left open is chosen by predicted times.
struct ScheduleRequest {
  std::optional<Method> method = std::nullopt;
  std::optional<int64_t> chunks = std::nullopt;
  // Of a ring, by hand, as in Schedule.
  std::vector<std::vector<int64_t>> distances = {};
  std::optional<int64_t> depth = std::nullopt;

  bool operator==(const ScheduleRequest&) const = default;
};

// What moves and products are planned by. All ranks must have the same.
struct ProductContext {
  Lowering lowering = Lowering::kNccl;
  std::optional<Topology> topology = std::nullopt;
  // Taken for their pairs of layouts in place of what the planner would find; null: none.
  PinsPtr pins = nullptr;
  // How long products take, by the name of the dtype of what is moved beside them.
  std::map<std::string, GemmModel> gemm_models = {};

  // Throws UserError where there is none.
  const GemmModel& gemm_model(const DType& dtype) const;

  // Where none is given, the default of the lowering.
  Topology known_topology() const;
};

struct ProductProblem {
  // By weight: operand,weight->result.
  std::vector<std::string> axes;
  Layout operand;
  std::vector<Layout> weights;
  // By weight; of the result's last axis.
  std::vector<std::optional<Layout>> biases;
  // By weight: where results are asked for.
  std::vector<Layout> results;
  // Default: those with the least predicted time.
  std::optional<AxisCuts> cuts = std::nullopt;
  ScaledBy scaled_by = ScaledBy::kNothing;
  // By row, of operand and weights: where scales are given that do not lie as the rows of their operand do.
  std::vector<std::optional<Layout>> scales = {};
  // Whether the backward is to find the operand as gathered.
  bool keeps_gathered = false;
  ScheduleRequest schedule = {};
  ProductContext context = {};
};

// Throws UserError naming what does not fit.
void check(const ProductProblem& problem);

}  // namespace shardwright
