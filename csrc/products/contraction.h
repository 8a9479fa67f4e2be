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
  // By tensor dim: its axis. Axes are numbered by first appearance: "bsk,nk->bsn" has lhs {0, 1, 2}, rhs {3, 2} and out
  // {0, 1, 3}.
  std::vector<int> lhs;
  std::vector<int> rhs;
  std::vector<int> out;

  // Parses an einsum such as "bsk,nk->bsn". Throws UserError if the text is not of the form "lhs,rhs->out" with letters
  // a to z, or if an axis repeats within a tensor, or appears in only one tensor or in all three.
  static Contraction parse(const std::string& text);
  // Returns the einsum with the letters a, b, c, ... for axes 0, 1, 2, ...: "abc,dc->abd" for "bsk,nk->bsn".
  std::string to_string() const;

  int num_axes() const;            // number of different axes
  bool is_summed(int axis) const;  // true if the result lacks the axis

  bool operator==(const Contraction&) const = default;
};

// Returns true if `axis` is among the axes of a tensor (Contraction::lhs, rhs or out).
bool has_axis(const std::vector<int>& tensor_axes, int axis);

// Returns the dims of an operand along which the product does not sum. `operand_axes` is axes.lhs or axes.rhs. In
// "bsk,nk->bsn" these are the dims {0, 1} of lhs and {0} of rhs.
std::vector<int> free_dims_of(const Contraction& axes, const std::vector<int>& operand_axes);

}  // namespace shardwright
