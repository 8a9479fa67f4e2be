// A product of two tensors over the axes they share, as einsum writes it: "bsk,nk->bsn".
//
// Every axis is in exactly two of the three tensors: free in the result, or summed over. Operands may come in either
// order, and the axes of the result in any.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardwright {

struct Contraction {
  // The axis of each tensor dim; axes are numbered by first appearance.
  std::vector<int> lhs;
  std::vector<int> rhs;
  std::vector<int> out;

  // Throws UserError on axes that repeat in a tensor, or are in one tensor or in all three.
  static Contraction parse(const std::string& text);
  std::string to_string() const;

  int num_axes() const;
  bool is_summed(int axis) const;  // not in the result

  bool operator==(const Contraction&) const = default;
};

bool has_axis(const std::vector<int>& dims, int axis);

// Of an operand with these axes: the dims that are not summed over.
std::vector<int> free_dims_of(const Contraction& axes, const std::vector<int>& operand);

}  // namespace shardwright
