#include "products/contraction.h"

#include <algorithm>

#include "support/error.h"

namespace shardwright {

bool has_axis(const std::vector<int>& tensor_axes, int axis) {
  return std::find(tensor_axes.begin(), tensor_axes.end(), axis) != tensor_axes.end();
}

std::vector<int> free_dims_of(const Contraction& axes, const std::vector<int>& operand_axes) {
  std::vector<int> dims;
  for (size_t d = 0; d < operand_axes.size(); ++d) {
    if (!axes.is_summed(operand_axes[d])) dims.push_back(static_cast<int>(d));
  }
  return dims;
}

Contraction Contraction::parse(const std::string& text) {
  const size_t comma = text.find(',');
  const size_t arrow = text.find("->");
  check_user(comma != std::string::npos && arrow != std::string::npos && comma < arrow,
             "contraction must be an einsum of two operands, such as 'mk,kn->mn', got '", text, "'");
  std::string letters;
  const auto axes_of = [&](const std::string& part) {
    std::vector<int> axes;
    for (const char letter : part) {
      check_user(letter >= 'a' && letter <= 'z', "contraction must have axes a to z, got '", letter, "' in '", text,
                 "'");
      size_t axis = letters.find(letter);
      if (axis == std::string::npos) {
        axis = letters.size();
        letters.push_back(letter);
      }
      check_user(!has_axis(axes, static_cast<int>(axis)),
                 "contraction must have each axis at most once in a tensor, got '", letter, "' twice in '", text, "'");
      axes.push_back(static_cast<int>(axis));
    }
    return axes;
  };
  Contraction contraction;
  contraction.lhs = axes_of(text.substr(0, comma));
  contraction.rhs = axes_of(text.substr(comma + 1, arrow - comma - 1));
  contraction.out = axes_of(text.substr(arrow + 2));
  for (int axis = 0; axis < static_cast<int>(letters.size()); ++axis) {
    const int tensors =
        has_axis(contraction.lhs, axis) + has_axis(contraction.rhs, axis) + has_axis(contraction.out, axis);
    check_user(tensors == 2,
               "contraction must have each axis in both operands, or in one operand and the result, got '",
               letters[axis], "' in ", tensors, " tensors of '", text, "'");
  }
  return contraction;
}

std::string Contraction::to_string() const {
  const auto letters = [](const std::vector<int>& tensor_axes) {
    std::string text;
    for (const int axis : tensor_axes) text.push_back(static_cast<char>('a' + axis));
    return text;
  };
  return letters(lhs) + "," + letters(rhs) + "->" + letters(out);
}

int Contraction::num_axes() const { return static_cast<int>(lhs.size() + rhs.size() + out.size()) / 2; }

bool Contraction::is_summed(int axis) const { return !has_axis(out, axis); }

}  // namespace shardwright
