// Numbers the lists of cuts of each tensor dim. Lists that make the same parts share a number if digits
// (exchange/digits.h) describe them or if their canonical forms (moves/spans.h) are equal; other lists that make the
// same parts have different numbers.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "exchange/digits.h"
#include "moves/rank_classes.h"

namespace shardwright {

// A list of cuts of one tensor dim.
struct CutList {
  std::vector<Cut> cuts;
  MeshDimSet dims;     // the mesh dims that make the cuts
  int64_t length = 0;  // indices of the largest part
  bool has_equal_parts = false;
  std::optional<std::vector<Digit>> digits;  // only if parts are equal, and not always then
  bool first_is_largest = true;              // false: the rank at position 0 may not have the largest part
};

class CutLists {
 public:
  // The layout has the shape and the mesh of the lists, and must outlive the object.
  explicit CutLists(const Layout& layout)
      : layout_(layout), lists_(layout.ndim()), numbers_(layout.ndim()), corners_(layout.mesh()) {}

  // Adds a list of cuts of a tensor dim if it is new, and returns its number. Numbers count from 0.
  int number_of(int tensor_dim, const std::vector<Cut>& cuts);
  // Returns the list with a number. The reference is valid until number_of() adds a list of this tensor dim.
  const CutList& at(int tensor_dim, int number) const { return lists_[tensor_dim][number]; }
  // Returns the number of lists of a tensor dim.
  size_t size(int tensor_dim) const { return lists_[tensor_dim].size(); }
  // Returns the corners for the lists without digits.
  const Corners& corners() const { return corners_; }

 private:
  const Layout& layout_;
  std::vector<std::vector<CutList>> lists_;                   // by tensor dim, then by number
  std::vector<std::map<std::vector<int64_t>, int>> numbers_;  // of lists without digits, by tensor dim
  Corners corners_;
};

}  // namespace shardwright
