// Closed forms for even cuts: the elements that two lists of cuts have in common, without visiting parts.
//
// Write an index into a tensor dim in mixed radix. A cut into equal parts fixes one digit: the digit must equal the
// coordinate on the cut's mesh dim. For example, S(0) over a, then b, of 64 = 4 x 4 x 4 fixes the first digit by a and
// the second by b; SS(0, 4) over b alone fixes the second. So two lists of cuts make the same parts exactly if they fix
// the same digits by the same mesh dims, and the number of common elements of two parts is a product over digits.
//
// The cost of all functions on digits is independent of the sizes of the mesh and the tensor.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// A digit of an index, fixed by a mesh dim: index / weight % radix == coordinate on mesh_dim.
struct Digit {
  int64_t weight = 1;
  int64_t radix = 1;
  int mesh_dim = 0;
  bool operator==(const Digit&) const = default;
};

// Returns the digits that these cuts fix, largest weight first. Returns nullopt if n is 0, if parts differ in size, if
// no strided cut makes the parts of a cut, or if a cut takes a piece of a digit that an earlier cut fixed.
std::optional<std::vector<Digit>> digits_of(const Mesh& mesh, int64_t n, std::span<const Cut> cuts);

// Two lists of digits of an index in [0, n), refined into common digits that express both lists.
//
// Example: 12 elements on (a=2, b=4), S(0) over a before and S(0) over b after. Before, a fixes the digit of weight 6
// and radix 2. After, b fixes the digit of weight 3 and radix 4. The common digits are:
//
//   weight 3, radix 2    free before       b % 2 after
//   weight 6, radix 2    a before          b / 2 after    a tie
//
// The parts of a rank before and after intersect if a == b / 2. Then they share 3 elements.
class Matching {
 public:
  static constexpr int kMaxDigits = 24;  // maximum number of common digits

  // The part of a coordinate that fixes a digit: coordinate / divisor % radix.
  struct Owner {
    int mesh_dim = -1;  // -1: no mesh dim fixes the digit, so every part has all its values
    int64_t divisor = 1;
    bool operator==(const Owner&) const = default;

    int64_t value_at(const Mesh& mesh, int64_t position, int64_t radix) const {
      return mesh.coordinate(position, mesh_dim) / divisor % radix;
    }
  };
  // A common digit, and the coordinates that fix it in the first list (`before`) and the second (`after`).
  struct Common {
    int64_t radix = 1;
    Owner before;
    Owner after;
    // Returns true if the digit is a *tie*: both lists fix it, by different coordinates.
    bool is_tie() const { return before.mesh_dim >= 0 && after.mesh_dim >= 0 && !(before == after); }
    // Returns true if the rank at `position` has the same value of the digit in both lists, or if one list does not fix
    // it.
    bool agrees_at(const Mesh& mesh, int64_t position) const;
  };

  // Returns nullopt if a digit of one list straddles a digit of the other list (radix 2 and 3, for example), or if
  // there are more than kMaxDigits common digits or digits of both lists together.
  static std::optional<Matching> of(int64_t n, std::span<const Digit> before, std::span<const Digit> after);
  // Matches the digits of two lists of cuts. Also returns nullopt if a list has no digits (digits_of).
  static std::optional<Matching> of_cuts(const Mesh& mesh, int64_t n, std::span<const Cut> before,
                                         std::span<const Cut> after);

  // Returns the common digits that at least one list fixes, smallest weight first.
  std::span<const Common> digits() const { return {digits_.data(), static_cast<size_t>(count_)}; }
  // Returns the number of elements that a part of the first list and a part of the second share if they intersect: the
  // number of combinations of values of the digits that neither list fixes.
  int64_t elements_per_overlap() const { return elements_per_overlap_; }
  // Returns the number of parts of the first list that one part of the second intersects.
  int64_t sources() const;
  // Returns the mesh dims that fix ties.
  MeshDimSet tied_dims() const;
  // Returns true if the two parts of the rank at `position`, one by each list, intersect.
  bool agrees_at(const Mesh& mesh, int64_t position) const;

 private:
  std::array<Common, kMaxDigits> digits_;
  int count_ = 0;
  int64_t elements_per_overlap_ = 1;
};

// The number of elements that each rank holds in both of two layouts of one tensor on one mesh. The layouts must
// outlive the object.
class SharedElements {
 public:
  SharedElements(const Layout& before, const Layout& after);

  // Returns the number of shared elements of the rank at `position`.
  int64_t at(int64_t position) const;
  // Returns the sum over all ranks without visiting them, or nullopt if that would take too long.
  std::optional<int64_t> sum() const;

  // Returns mesh dims such that at() depends on no other coordinates; all if matchings() is empty.
  MeshDimSet varying_dims() const;

  // Returns the common digits of each tensor dim; empty if digits do not describe both layouts completely, or if the
  // tensor has no dims.
  const std::vector<Matching>& matchings() const { return matchings_; }

 private:
  const Layout& before_;
  const Layout& after_;
  std::vector<Matching> matchings_;
};

}  // namespace shardwright
