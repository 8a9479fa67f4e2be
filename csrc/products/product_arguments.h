// The arguments of a product function, and the problem that they describe.
//
// Tensors are described by shape, dtype and layout; their elements are not needed. Plain tensors are this rank's parts
// of tensors in one process group; the function that is called determines their layouts. DTensors have their own.
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
  bool is_transposed = false;                   // plain weights (k, n) only: true for a view of a contiguous (n, k)
};

// Returns true if a matrix (k, n) with these strides is a view of a contiguous (n, k), such as `linear.weight.t()`.
// Such a view is multiplied without a copy. Returns false for k < 2, where strides cannot tell, and for tensors that
// are no matrices. Ranks may get different results, because users may transpose on some ranks only. So schedules
// and messages, on which ranks must agree, do not depend on the result. Neither does operands_text (matmul.h), which
// debug modes compare.
bool is_transposed(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides);

// The function that is called. x has the shape (..., k), the result (..., n).
//
//   function   weight   plain tensors                                             DTensors
//   kLinear    (n, k)   none                                                      any placements; the cuts are free
//   kGather    (k, n)   x sharded in `dim`, weights and results in their columns  sharded dims stay sharded
//   kSum       (k, n)   x and weight sharded in k; the result in `dim`, or full   sharded dims stay sharded
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
  bool requires_grad = false;                     // true if some argument needs a gradient

  std::optional<std::vector<Placement>> placements = std::nullopt;  // of the results; DTensors only
  // gather_dim or scatter_dim; negative: from the end. kGather of plain tensors needs it, and kGather of DTensors
  // ignores it. Without it, kSum returns the full result.
  std::optional<int64_t> dim = std::nullopt;

  // For plain tensors: the global length of the sharded dim of x, which no rank can derive alone.
  std::optional<int64_t> size = std::nullopt;
  std::vector<int64_t> sizes = {};  // by rank: the length of its part of that dim; empty: as torch.chunk cuts it
  std::vector<std::optional<int64_t>> columns = {};  // global number of columns, by weight
  int64_t rank = 0;                                  // of this process in its group of `num_ranks` ranks
  int64_t num_ranks = 1;
  // True: problem_of throws unless this rank's parts have the lengths that `sizes` or torch.chunk gives. Debug modes
  // set it to false, because they check the parts of all ranks at once.
  bool checks_parts = true;
};

// Returns the problem; the caller sets its schedule, its context and keeps_gathered. Throws UserError if an argument is
// invalid.
ProductProblem problem_of(const ProductArguments& arguments);

}  // namespace shardwright
