// A product of two tensors over the axes they share, as einsum writes it: "bsk,nk->bsn".
//
// Every axis appears in exactly two of the three tensors: in both operands, where it is summed over, or in one operand
// and the result, where it is free. Operands may come in either order, and the result's axes in any order.
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

  // Throws UserError if an axis repeats within a tensor, or appears in only one tensor or in all three.
  static Contraction parse(const std::string& text);
  std::string to_string() const;

  int num_axes() const;
  bool is_summed(int axis) const;  // not in the result

  bool operator==(const Contraction&) const = default;
};

bool has_axis(const std::vector<int>& dims, int axis);

// Returns the dims of an operand with these axes that are not summed over.
std::vector<int> free_dims_of(const Contraction& axes, const std::vector<int>& operand);

}  // namespace shardwright
