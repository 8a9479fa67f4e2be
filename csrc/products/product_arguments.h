// The arguments of a product as a caller gives them, and the problem that they describe.
//
// Tensors are described, not held, because their elements are not needed. Plain tensors are this rank's parts of
// tensors in one process group; the function that is called determines their layouts. DTensors have their own layouts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "products/product_problem.h"

namespace shardwright {

struct GivenTensor {
  std::string name;            // of the argument, for messages: "weights[0]"
  std::vector<int64_t> shape;  // the global shape of a DTensor, or that of this rank's part of a plain tensor
  DType dtype = DType::kFloat32;
  std::string device;
  std::optional<Layout> layout = std::nullopt;  // DTensors only
  bool is_transposed = false;                   // plain weights (k, n) only: it is the view of a contiguous (n, k)
};

// Returns whether a matrix (k, n) with such strides is the view of a contiguous (n, k), as `linear.weight.t()` is,
// which is multiplied without a copy. Ranks may answer differently: users may transpose on some ranks only, and of a
// single row nobody can tell. So nothing that ranks must agree on may depend on it: neither schedules nor what is sent
// do, and debug modes compare operands_text (matmul.h).
bool is_transposed(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides);

// The operands. x has the shape (..., k), the result (..., n).
//
//   function   weight   plain tensors                                         DTensors
//   kLinear    (n, k)   none                                                  any placements; the cuts are free
//   kGather    (k, n)   x cut in `dim`, weights and results in their columns  what is cut stays cut
//   kSum       (k, n)   x and weight cut in k; the result in `dim`, or whole  what is cut stays cut
enum class ProductFunction : uint8_t { kLinear, kGather, kSum };

ProductFunction parse_product_function(const std::string& name);  // "linear", "gather" or "sum"; throws UserError

struct ProductArguments {
  ProductFunction function = ProductFunction::kLinear;
  GivenTensor x;
  std::vector<GivenTensor> weights;
  std::vector<std::optional<GivenTensor>> biases;  // by weight
  // The scales of x, then of the weights; empty, or all missing, if operands are not scaled.
  std::vector<std::optional<GivenTensor>> scales = {};
  std::optional<DType> out_dtype = std::nullopt;  // with scales: bfloat16 or float32
  bool requires_grad = false;                     // whether a gradient will be asked of anything given

  std::optional<std::vector<Placement>> placements = std::nullopt;  // of DTensors: of the results
  std::optional<int64_t> dim = std::nullopt;  // which `function` reads; from the end where it is negative

  // For plain tensors: global sizes, which no rank can know by itself.
  std::optional<int64_t> size = std::nullopt;
  std::vector<int64_t> sizes = {};  // by rank, if the dim that `size` is of is not cut as torch.chunk cuts
  std::vector<std::optional<int64_t>> columns = {};  // by weight
  int64_t rank = 0;
  int64_t num_ranks = 1;
  // True if a part with another size than torch.chunk gives is rejected. Debug modes leave that to a check on all
  // ranks.
  bool checks_parts = true;
};

// Returns the problem, without its schedule, its context and what it keeps. Throws UserError that names the argument
// that does not fit, its value and what is allowed.
ProductProblem problem_of(const ProductArguments& arguments);

}  // namespace shardwright
