// Random products of placed tensors.
#pragma once

#include <algorithm>
#include <memory>
#include <random>

#include "products.h"
#include "products/product_plan.h"

namespace shardwright {

inline const ProductContext& context(const Lowering& lowering) {
  static const GemmModel model = GemmModel::named("cpu");
  static const std::map<std::string, GemmModel> models{
      {"float32", model}, {"bfloat16", model}, {"float8_e4m3fn", model}, {"float8_e5m2", model}};
  static const ProductContext contexts[] = {{Lowering::kNccl, std::nullopt, {}, models},
                                            {Lowering::kGloo, std::nullopt, {}, models}};
  return contexts[lowering == Lowering::kNccl ? 0 : 1];
}

// Returns a problem with any axes, sizes and placements, one to three weights, with or without given cuts and scales.
// If `has_rules`, placements may have any rule.
class RandomProblem {
 public:
  explicit RandomProblem(unsigned seed, bool has_rules = false) : random_(seed), has_rules_(has_rules) {
    std::vector<int64_t> mesh_sizes;
    for (int64_t d = 0, dims = pick(1, 2); d < dims; ++d) mesh_sizes.push_back(pick(1, dims == 1 ? 4 : 3));
    mesh_ = mesh_of(mesh_sizes);
    const auto letters = [&](char first) {
      return std::string{first, static_cast<char>(first + 1)}.substr(pick(0, 1));
    };
    const std::string rows = letters('a');
    const std::string columns = letters('n');
    const std::string summed = letters('k');
    for (const char letter : rows + summed) sizes_[letter] = size();
    const ScaledBy scaled_by = static_cast<ScaledBy>(pick(0, 3) == 0 ? pick(1, 2) : 0);
    const bool is_scaled = scaled_by != ScaledBy::kNothing;
    const char* dtype = is_scaled ? "float8_e4m3fn" : "float32";
    const char* result_dtype = is_scaled ? "bfloat16" : "float32";
    const std::string operand = shuffled(rows + summed);
    ProductProblem made{{}, any_layout(operand, dtype, !is_scaled), {}, {}, {}};
    made.scaled_by = scaled_by;
    made.keeps_gathered = pick(0, 1) == 1;
    made.context = context(pick(0, 1) == 0 ? Lowering::kNccl : Lowering::kGloo);
    for (int64_t j = 0, count = pick(0, 2) == 0 ? pick(2, 3) : 1; j < count; ++j) {
      for (const char letter : columns) sizes_[letter] = size();
      const std::string weight = shuffled(summed + columns);
      const std::string result = shuffled(rows + columns);
      made.axes.push_back(operand + "," + weight + "->" + result);
      made.weights.push_back(any_layout(weight, dtype, !is_scaled));
      made.results.push_back(any_layout(result, result_dtype, true));
      made.biases.emplace_back();
      if (pick(0, 1) == 1) made.biases[j] = any_layout(std::string(1, result.back()), result_dtype, true);
    }
    if (pick(0, 1) == 1) {
      made.cuts.emplace();
      const std::string axes = std::string(1, kNoAxis) + rows + columns + summed;
      for (int d = 0; d < mesh_->ndim(); ++d) {
        made.cuts->push_back(axes[static_cast<size_t>(pick(0, static_cast<int64_t>(axes.size()) - 1))]);
      }
    }
    problem = std::make_unique<ProductProblem>(std::move(made));
  }

  int64_t pick(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random_); }
  std::mt19937& random() { return random_; }

  Layout elsewhere(const Layout& layout, bool may_be_due) {
    std::vector<std::string> placements;
    for (int d = 0; d < mesh_->ndim(); ++d) {
      const int64_t dim = pick(-1 - static_cast<int64_t>(may_be_due && pick(0, 2) == 0), layout.ndim() - 1);
      placements.push_back(dim == -2 ? "P" : dim == -1 ? "R" : concat("S(", dim, ")"));
    }
    if (!has_rules_ || pick(0, 1) == 0)
      return layout_on(mesh_, layout.shape(), placements, layout.dtype().name().c_str());
    for (int d = 0; d < mesh_->ndim(); ++d) {
      if (placements[d].starts_with('S')) placements[d] = by_rule(placements[d][2], layout, mesh_->dim_size(d));
    }
    try {
      return layout_on(mesh_, layout.shape(), placements, layout.dtype().name().c_str());
    } catch (const UserError&) {  // sizes that do not match behind another cut
      return elsewhere(layout, may_be_due);
    }
  }

  std::unique_ptr<ProductProblem> problem;

 private:
  // Returns a cut of a tensor dim over k coordinates by any rule.
  std::string by_rule(char dim, const Layout& layout, int64_t k) {
    const int64_t n = layout.shape()[dim - '0'];
    const int64_t first = pick(0, n);
    std::string sizes = k == 1 ? std::to_string(n) : concat(first, ":", n - first);
    for (int64_t c = 2; c < k; ++c) sizes += ":0";
    const std::vector<std::string> all{concat("S(", dim, ")"),
                                       concat("Blocks(", dim, ",2)"),
                                       concat("Cyclic(", dim, ",1)"),
                                       concat("Owned(", dim, ",", pick(0, k - 1), ")"),
                                       concat("Ragged(", dim, ",", sizes, ")"),
                                       concat("Packed(", dim, ",", first, ":", n - first, ")")};
    return all[pick(0, std::ssize(all) - 1)];
  }

  int64_t size() { return pick(0, 9) == 0 ? 0 : pick(1, 5); }

  std::string shuffled(std::string letters) {
    std::shuffle(letters.begin(), letters.end(), random_);
    return letters;
  }

  Layout any_layout(const std::string& letters, const char* dtype, bool may_be_due) {
    std::vector<int64_t> shape;
    for (const char letter : letters) shape.push_back(sizes_[letter]);
    return elsewhere(layout_on(mesh_, shape, std::vector<std::string>(mesh_->ndim(), "R"), dtype), may_be_due);
  }

  std::mt19937 random_;
  bool has_rules_;
  MeshPtr mesh_;
  std::map<char, int64_t> sizes_;
};

}  // namespace shardwright
