#include "products/product_arguments.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <string_view>

#include "cost/cost.h"
#include "products/product_layouts.h"
#include "products/scaled_dtypes.h"
#include "support/error.h"
#include "support/names.h"

namespace shardwright {
namespace {

constexpr const char* kFunctionNames[] = {"linear", "gather", "sum"};
// Letters of the dims of x except the last, which is k. The result's last dim is n.
constexpr std::string_view kRows = "abcdefghij";

const char* function_name(ProductFunction function) { return kFunctionNames[static_cast<int>(function)]; }

// Returns the name that torch prints: "torch.float32".
std::string torch_name(const DType& dtype) { return concat("torch.", dtype.name()); }

// Returns "(3, 5)", "(4,)" or "()".
std::string tuple_text(const std::vector<int64_t>& shape) {
  return concat("(", join(shape), shape.size() == 1 ? ",)" : ")");
}

// Makes the problem from arguments. make() calls the checks in an order in which each finds the members that it reads
// (scaled_by_, result_dtype_, dim_) already set.
class ProblemMaker {
 public:
  explicit ProblemMaker(const ProductArguments& arguments) : given_(arguments), result_dtype_(arguments.x.dtype) {}

  ProductProblem make() {
    check_counts();
    check_kind();
    check_scales();
    check_x();
    for (const GivenTensor& weight : given_.weights) check_is_like_x(weight);
    for (const auto& bias : given_.biases) {
      if (bias) check_is_like_x(*bias);
    }
    dim_ = dim_of_x();
    for (const GivenTensor& weight : given_.weights) check_weight(weight);
    return given_.x.layout ? of_dtensors() : of_plain_tensors();
  }

 private:
  bool is_linear() const { return given_.function == ProductFunction::kLinear; }
  bool is_gather() const { return given_.function == ProductFunction::kGather; }
  int64_t ndim() const { return static_cast<int64_t>(given_.x.shape.size()); }
  // Returns the dim of a weight that is summed over.
  size_t k_dim() const { return is_linear() ? 1 : 0; }
  // Returns operand `i`: x (0) or a weight (1 and more).
  const GivenTensor& operand(size_t i) const { return i == 0 ? given_.x : given_.weights[i - 1]; }

  // Checks that there is a weight, and an entry for the bias of each weight.
  void check_counts() const {
    check_argument(!given_.weights.empty(), "weights", "a list of at least one weight", "none");
    check_user(given_.biases.size() == given_.weights.size(), "biases must have one entry for each of ",
               given_.weights.size(), " weights, got ", given_.biases.size());
  }

  // Checks that arguments for plain tensors are absent if x is a DTensor, and the other way round.
  void check_kind() const {
    if (!given_.x.layout) {
      check_user(!given_.placements, "placements must be None for plain tensors, got a list; use DTensors");
      return;
    }
    const bool has_columns = std::any_of(given_.columns.begin(), given_.columns.end(), [](auto n) { return !!n; });
    check_user(!given_.size && given_.sizes.empty(), "size must be None for DTensors, whose sizes are known, got one");
    check_user(!has_columns, "columns must be None for DTensors, whose sizes are known, got one");
  }

  // ---- scales of 8-bit floats

  bool has_scales() const {
    return std::any_of(given_.scales.begin(), given_.scales.end(), [](const auto& scale) { return scale.has_value(); });
  }

  // Checks that scales are given for all operands or for none, and their shapes and dtypes. Sets result_dtype_ and
  // scaled_by_.
  void check_scales() {
    const std::string names = is_gather() ? "weight_scales" : "weight_scale";
    if (!has_scales()) {
      check_argument(!given_.out_dtype, "out_dtype", "None without scales, because the result has the dtype of x",
                     torch_name(given_.out_dtype.value_or(DType::kFloat32)));
      check_user(!takes_scales(given_.x.dtype), "x_scale must be given together with ", names, " for x of ",
                 torch_name(given_.x.dtype), ", got None");
      return;
    }
    const bool has_all = std::all_of(given_.scales.begin(), given_.scales.end(), [](const auto& s) { return !!s; });
    const bool lacks_x = !given_.scales[0].has_value();
    check_user(has_all && given_.scales.size() > 1, lacks_x ? "x_scale" : names, " must be given together with ",
               lacks_x ? names : "x_scale", ", got None; scale all operands, or none");
    check_user(given_.scales.size() == given_.weights.size() + 1, "weight_scales must have one entry for each of ",
               given_.weights.size(), " weights, got ", given_.scales.size() - 1);
    result_dtype_ = given_.out_dtype.value_or(DType::kBFloat16);
    check_argument(is_scaled_result(result_dtype_), "out_dtype", "torch.bfloat16 or torch.float32 with scales",
                   torch_name(result_dtype_));
    check_scaled_operands();
    check_user(!given_.requires_grad,
               "requires_grad of x, weights, biases and scales must be False with scales, got True. Products of 8-bit "
               "floats have no gradients");
    for (size_t i = 0; i < given_.scales.size(); ++i) {
      if (check_is_by_row(*given_.scales[i], operand(i), i == 0 ? given_.x.shape.size() - 1 : k_dim())) {
        scaled_by_ = ScaledBy::kRow;
      } else if (scaled_by_ == ScaledBy::kNothing) {
        scaled_by_ = ScaledBy::kTensor;
      }
    }
  }

  // Checks the number of dims and the dtypes of operands that have scales, and the dtypes of biases.
  void check_scaled_operands() const {
    check_user(ndim() >= 1, "x must have at least one dim, got ", ndim());
    for (const GivenTensor& weight : given_.weights) {
      check_user(weight.shape.size() == 2, weight.name, " must have two dims, got shape ", tuple_text(weight.shape));
    }
    for (size_t i = 0; i <= given_.weights.size(); ++i) {
      const GivenTensor& tensor = operand(i);
      check_user(takes_scales(tensor.dtype), tensor.name,
                 " must have dtype torch.float8_e4m3fn or torch.float8_e5m2 with scales, got ",
                 torch_name(tensor.dtype));
      const bool are_both_e5m2 = tensor.dtype == DType::kFloat8E5M2 && given_.x.dtype == DType::kFloat8E5M2;
      check_user(i == 0 || !are_both_e5m2, tensor.name,
                 " must have dtype torch.float8_e4m3fn if x has torch.float8_e5m2, got ", torch_name(tensor.dtype));
    }
    for (const auto& bias : given_.biases) {
      if (!bias) continue;
      check_user(bias->dtype == result_dtype_, bias->name, " must have the dtype of the result (",
                 torch_name(result_dtype_), "), got ", torch_name(bias->dtype));
    }
  }

  // Checks a scale. Returns true if it has one value for each row of its operand, false if it is one value. `k_dim` is
  // the operand's summed dim. The number of dims decides, not the number of elements, because a rank may hold only one
  // row.
  static bool check_is_by_row(const GivenTensor& scale, const GivenTensor& operand, size_t k_dim) {
    check_user(scale.dtype == DType::kFloat32 && scale.device == operand.device, scale.name,
               " must be torch.float32 on ", operand.device, ", got ", torch_name(scale.dtype), " on ", scale.device);
    if (scale.layout) {
      check_user(operand.layout && operand.layout->mesh() == scale.layout->mesh(), scale.name,
                 " must be a plain tensor, or on the mesh of its operand, got a DTensor on ", scale.layout->mesh());
      for (const Placement& placement : scale.layout->placements()) {
        const bool cuts_k = placement.is_shard_like() && placement.dim == static_cast<int64_t>(k_dim);
        check_user(!placement.is_partial() && !cuts_k, scale.name,
                   " must have placements Replicate() or Shard of a dim other than ", k_dim, ", got ",
                   scale.layout->placements_string());
      }
    }
    std::vector<int64_t> rows = operand.shape;
    rows[k_dim] = 1;
    if (rows.size() > 1 && scale.shape == rows) {
      const int64_t num_rows = std::accumulate(rows.begin(), rows.end(), int64_t{1}, std::multiplies<>());
      check_user(!operand.layout || scale.layout, scale.name,
                 " must be a DTensor, like its operand, got a plain tensor of ", num_rows, " rows");
      return true;
    }
    check_user(scale.shape.empty() || scale.shape == std::vector<int64_t>{1}, scale.name,
               " must have shape () for all of the operand, or ", tuple_text(rows), " for its rows, got ",
               tuple_text(scale.shape));
    if (!scale.layout) return false;
    const std::vector<Placement>& placements = scale.layout->placements();
    const bool is_whole = std::all_of(placements.begin(), placements.end(), [](auto p) { return p.is_replicate(); });
    check_user(is_whole, scale.name, " must have the placements Replicate() if it is one number, got ",
               scale.layout->placements_string());
    return false;
  }

  // ---- checks of all products

  // Checks that x is a DTensor for kLinear, its dtype, and its number of dims.
  void check_x() const {
    check_argument(!is_linear() || given_.x.layout, "x", "a DTensor", "a Tensor");
    const bool is_float = given_.x.dtype.kind() == DTypeKind::kFloat;
    check_user(is_float || scaled_by_ != ScaledBy::kNothing, "x must have a floating dtype, got ",
               torch_name(given_.x.dtype));
    check_user(ndim() >= 1 && ndim() <= static_cast<int64_t>(kRows.size()), "x must have 1 to ", kRows.size(),
               " dims, got ", ndim());
  }

  // Checks that a weight or bias is a plain tensor if x is one; otherwise, that it is a DTensor on the mesh of x with
  // the dtype of x.
  void check_is_like_x(const GivenTensor& tensor) const {
    const GivenTensor& x = given_.x;
    if (!x.layout) {
      check_argument(!tensor.layout, tensor.name, "a plain tensor, like x", "a DTensor");
      return;
    }
    check_argument(tensor.layout.has_value(), tensor.name, "a DTensor, like x", "a Tensor");
    check_user(tensor.layout->mesh() == x.layout->mesh(), tensor.name, " must be on the mesh of x (", x.layout->mesh(),
               "), got ", tensor.layout->mesh());
    check_user(tensor.dtype == x.dtype || scaled_by_ != ScaledBy::kNothing, tensor.name, " must have the dtype of x (",
               torch_name(x.dtype), "), got ", torch_name(tensor.dtype));
  }

  // Checks the shape, dtype and device of a weight.
  void check_weight(const GivenTensor& weight) const {
    const GivenTensor& x = given_.x;
    const bool k_is_cut = is_gather() && dim_ == ndim() - 1;
    const bool fits = weight.shape.size() == 2 && (weight.shape[k_dim()] == x.shape.back() || k_is_cut);
    const std::string k = k_is_cut ? "k" : std::to_string(x.shape.back());
    check_user(fits, weight.name, " must have shape (", is_linear() ? "out_features, " : "", k,
               is_linear() ? ")" : ", n)", " for x of shape ", tuple_text(x.shape), ", got ", tuple_text(weight.shape));
    const bool has_dtype = weight.dtype == x.dtype || scaled_by_ != ScaledBy::kNothing;
    check_user(has_dtype && weight.device == x.device, weight.name, " must be ", torch_name(x.dtype), " on ", x.device,
               ", like x, got ", torch_name(weight.dtype), " on ", weight.device);
  }

  // Returns gather_dim or scatter_dim as a non-negative dim. Returns nullopt if none was given, and for a gather of
  // DTensors, which ignores it. Throws UserError if it is out of range.
  std::optional<int64_t> dim_of_x() const {
    if (!given_.dim || (is_gather() && given_.x.layout)) return std::nullopt;
    check_argument(*given_.dim >= -ndim() && *given_.dim < ndim(), is_gather() ? "gather_dim" : "scatter_dim",
                   InRange{-ndim(), ndim() - 1}, *given_.dim);
    return *given_.dim < 0 ? *given_.dim + ndim() : *given_.dim;
  }

  // Returns the contraction of x and a weight of shape (n, k) or (k, n): "abk,nk->abn" for x of three dims.
  std::string axes(bool is_weight_nk) const {
    const std::string rows(kRows.substr(0, static_cast<size_t>(ndim() - 1)));
    return concat(rows, "k,", is_weight_nk ? "nk" : "kn", "->", rows, "n");
  }

  // ---- DTensors

  // Returns the problem of DTensors, which have layouts.
  ProductProblem of_dtensors() const {
    const std::string letters = axes(is_linear());
    const Layout& x = *given_.x.layout;
    ProductProblem problem{{}, x, {}, {}, {}};
    for (size_t j = 0; j < given_.weights.size(); ++j) {
      const Layout& weight = *given_.weights[j].layout;
      problem.axes.push_back(letters);
      problem.weights.push_back(weight);
      problem.biases.push_back(bias_of_dtensors(j));
      std::vector<int64_t> shape = x.shape();
      shape.back() = weight.shape()[1 - k_dim()];
      problem.results.emplace_back(x.mesh_ptr(), shape, result_dtype_, placements_of_result(letters, weight));
    }
    if (!is_linear()) problem.cuts = cuts_in_place(letters, x, problem.weights[0]);
    problem.scaled_by = scaled_by_;
    if (scaled_by_ == ScaledBy::kRow) {
      for (size_t i = 0; i < given_.scales.size(); ++i) problem.scales.push_back(layout_of_rows(i));
    }
    return problem;
  }

  // Returns the layout of bias j; nullopt if there is none. Checks its shape.
  std::optional<Layout> bias_of_dtensors(size_t j) const {
    const auto& bias = given_.biases[j];
    if (!bias) return std::nullopt;
    const int64_t columns = given_.weights[j].shape[1 - k_dim()];
    check_user(bias->shape == std::vector<int64_t>{columns}, bias->name, " must have shape (", columns, ",), got ",
               tuple_text(bias->shape));
    return bias->layout;
  }

  // Returns the requested placements. By default, the result stays where the product computes it; a sum reduces partial
  // placements to Shard(dim), or to Replicate() without `dim`.
  std::vector<Placement> placements_of_result(const std::string& letters, const Layout& weight) const {
    if (given_.placements) return *given_.placements;
    std::vector<Placement> placements = placements_in_place(letters, *given_.x.layout, weight);
    for (Placement& placement : placements) {
      if (given_.function != ProductFunction::kSum || !placement.is_partial()) continue;
      placement = dim_ ? Placement::shard(*dim_) : Placement::replicate();
    }
    return placements;
  }

  // Returns the layout of row scales without their summed dim, whose size is 1, or nullopt for plain tensors and
  // vectors.
  std::optional<Layout> layout_of_rows(size_t i) const {
    const GivenTensor& scale = *given_.scales[i];
    if (!scale.layout || scale.shape.size() < 2) return std::nullopt;
    const size_t summed = i == 0 ? scale.shape.size() - 1 : k_dim();
    std::vector<int> rows;
    for (size_t d = 0; d < scale.shape.size(); ++d) {
      if (d != summed) rows.push_back(static_cast<int>(d));
    }
    return with_dims(*scale.layout, rows, DType::kFloat32);
  }

  // ---- plain tensors

  // Returns the problem of plain tensors. Their layouts are on a mesh of one dim, "group".
  ProductProblem of_plain_tensors() const {
    const auto mesh = std::make_shared<Mesh>(std::vector<std::string>{"group"}, std::vector<int64_t>{given_.num_ranks});
    const auto make_layout = [&](std::vector<int64_t> shape, const DType& dtype, std::optional<int64_t> cut,
                                 const CutRule& rule = {}) {
      const Placement placement = cut ? Placement::cut(*cut, rule) : Placement::replicate();
      return Layout(mesh, std::move(shape), dtype, {placement});
    };
    std::vector<int64_t> shape = given_.x.shape;
    const int64_t cut = is_gather() ? *dim_ : ndim() - 1;
    shape[cut] = given_.sizes.empty() ? global_length(given_.size, given_.x.shape[cut], "size",
                                                      is_gather() ? concat("the length of dim ", cut, " of x")
                                                                  : "the length of the last dim of x")
                                      : sum_of_sizes(given_.x.shape[cut]);
    const CutRule by_size = given_.sizes.empty() ? CutRule() : CutRule::ragged(given_.sizes);
    ProductProblem problem{{}, make_layout(shape, given_.x.dtype, cut, by_size), {}, {}, {}};
    for (size_t j = 0; j < given_.weights.size(); ++j) {
      const GivenTensor& weight = given_.weights[j];
      const bool is_transposed = weight.is_transposed;
      const int64_t columns = is_gather()
                                  ? global_length(columns_of(j), weight.shape[1], "columns", "the number of columns")
                                  : weight.shape[1];
      std::vector<int64_t> weight_shape{shape.back(), columns};
      if (is_transposed) std::swap(weight_shape[0], weight_shape[1]);
      problem.axes.push_back(axes(is_transposed));
      problem.weights.push_back(is_gather() ? make_layout(weight_shape, weight.dtype, is_transposed ? 0 : 1)
                                            : make_layout(weight_shape, weight.dtype, is_transposed ? 1 : 0, by_size));
      std::vector<int64_t> result = shape;
      result.back() = columns;
      problem.results.push_back(make_layout(result, result_dtype_, is_gather() ? ndim() - 1 : dim_));
      problem.biases.emplace_back();
      if (!given_.biases[j]) continue;
      const std::optional<int64_t> bias_cut = is_gather() ? std::optional<int64_t>(0) : std::nullopt;
      problem.biases[j] = make_layout({columns}, given_.biases[j]->dtype, bias_cut);
      check_part(*given_.biases[j], *problem.biases[j]);
    }
    problem.cuts = given_.num_ranks == 1 ? std::string(1, kNoAxis) : is_gather() ? "n" : "k";
    problem.scaled_by = scaled_by_;
    return problem;
  }

  // Returns the global number of columns of weight j, or nullopt if it is not given.
  std::optional<int64_t> columns_of(size_t j) const {
    if (given_.columns.empty()) return std::nullopt;
    check_user(given_.columns.size() == given_.weights.size(), "columns must have one entry for each of ",
               given_.weights.size(), " weights, got ", given_.columns.size());
    return given_.columns[j];
  }

  // Returns the global length of a dim: the value of the argument named `argument`, or the local length if there is one
  // rank. Checks that torch.chunk gives this rank a part of the local length. `meaning` describes the global length in
  // messages.
  int64_t global_length(const std::optional<int64_t>& value, int64_t local_length, const char* argument,
                        const std::string& meaning) const {
    const int64_t ranks = given_.num_ranks;
    check_user(value || ranks == 1, argument, " must be ", meaning, " over all ", ranks,
               " ranks for plain tensors, got None. Pass ", saturating_product(local_length, ranks),
               " if all ranks have parts of the same size");
    const int64_t length = value.value_or(local_length);
    const int64_t chunk = length < 0 ? 0 : length / ranks + (length % ranks > 0 ? 1 : 0);
    const int64_t expected = std::clamp<int64_t>(length - given_.rank * chunk, 0, chunk);
    check_user(length >= 0 && (expected == local_length || !given_.checks_parts), argument,
               " must be a total length of which torch.chunk gives rank ", given_.rank, " of ", ranks, " a part of ",
               local_length, ", got ", length, ", of which it gets ", expected);
    return length;
  }

  // Returns the global length of a dim whose lengths on all ranks are given: the sum of given_.sizes. Checks that this
  // rank's size is the local length.
  int64_t sum_of_sizes(int64_t local_length) const {
    const auto ranks = static_cast<size_t>(given_.num_ranks);
    check_user(given_.sizes.size() == ranks, "size must have one length for each of ", ranks, " ranks, got ",
               given_.sizes.size());
    int64_t sum = 0;
    for (const int64_t size : given_.sizes) {
      check_user(size >= 0, "size must have lengths of at least 0, got ", size);
      sum = saturating_sum(sum, size);
    }
    const int64_t expected = given_.sizes[static_cast<size_t>(given_.rank)];
    check_user(expected == local_length || !given_.checks_parts, "size must have the length of the part of rank ",
               given_.rank, " (", local_length, "), got ", expected);
    return sum;
  }

  // Throws UserError unless a bias has the shape of this rank's part of the layout.
  void check_part(const GivenTensor& bias, const Layout& layout) const {
    const std::vector<int64_t> part = layout.local_shape(given_.rank);
    check_user(bias.shape == part, bias.name, " must have shape ", tuple_text(part), " on rank ", given_.rank, ", got ",
               tuple_text(bias.shape));
  }

  const ProductArguments& given_;
  ScaledBy scaled_by_ = ScaledBy::kNothing;
  DType result_dtype_;
  std::optional<int64_t> dim_;  // set by dim_of_x()
};

}  // namespace

bool is_transposed(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  if (shape.size() != 2) return false;
  const int64_t k = std::max<int64_t>(shape[0], 1);
  return strides[0] == 1 && strides[1] == k && k != 1;
}

ProductFunction parse_product_function(const std::string& name) {
  return parse_name("function", name, ProductFunction::kSum, function_name);
}

ProductProblem problem_of(const ProductArguments& arguments) { return ProblemMaker(arguments).make(); }

}  // namespace shardwright
