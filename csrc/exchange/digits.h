// Closed forms for even cuts: the elements that two lists of cuts have in common, without visiting parts.
//
// Write an index into a tensor dim in mixed radix. A cut into equal parts fixes one digit: the digit must equal the
// coordinate on the cut's mesh dim. For example, S(0) over a, then b, of 64 = 4 x 4 x 4 fixes the first digit by a and
// the second by b; SS(0, 4) over b alone fixes the second. So two lists of cuts hold the same parts exactly if they fix
// the same digits by the same mesh dims, and the number of common elements is a product over digits.
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

// Returns the digits that these cuts fix, largest weight first. Returns nullopt if parts differ in size, or if a cut
// takes a piece of a digit that an earlier cut fixed.
std::optional<std::vector<Digit>> digits_of(const Mesh& mesh, int64_t n, std::span<const Cut> cuts);

// Two lists of digits of n elements, refined into common digits that express both lists.
class Matching {
 public:
  static constexpr int kMaxDigits = 24;  // maximum number of common digits

  // The part of a coordinate that fixes a digit: coordinate / below % radix.
  struct Owner {
    int mesh_dim = -1;  // -1: no mesh dim fixes the digit, so all its values are held
    int64_t below = 1;
    bool operator==(const Owner&) const = default;
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

  // Returns nullopt if a digit of one list straddles a digit of the other list (sizes 2 and 3, for example), or if
  // there are more than kMaxDigits common digits.
  static std::optional<Matching> of(int64_t n, std::span<const Digit> before, std::span<const Digit> after);

  // Returns the common digits that at least one list fixes, smallest weight first.
  std::span<const Common> digits() const { return {digits_.data(), static_cast<size_t>(count_)}; }
  // Returns the number of combinations of values of the digits that neither list fixes.
  int64_t free() const { return free_; }

  // Returns the number of parts of the first list that one part of the second intersects.
  int64_t sources() const;

  // Returns true if the two parts of the rank at `position`, one by each list, intersect. They then share free()
  // elements.
  bool agrees_at(const Mesh& mesh, int64_t position) const;

 private:
  std::array<Common, kMaxDigits> digits_;
  int count_ = 0;
  int64_t free_ = 1;
};

// The number of elements that each rank holds in both of two layouts of one tensor on one mesh.
class SharedElements {
 public:
  SharedElements(const Layout& before, const Layout& after);

  // Returns the number of shared elements of the rank at `position`.
  int64_t at(int64_t position) const;
  // Returns the sum over all ranks without visiting them, or nullopt if that would take too long.
  std::optional<int64_t> sum() const;

  // Returns the mesh dims on whose coordinates at() depends.
  MeshDimSet varying_dims() const;

  // By tensor dim. Empty if digits do not describe both layouts completely.
  const std::vector<Matching>& matchings() const { return matchings_; }

 private:
  const Layout& before_;
  const Layout& after_;
  std::vector<Matching> matchings_;
};

}  // namespace shardwright
