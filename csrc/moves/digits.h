// Even cuts in closed form: what two of them share, without looking at a single part.
//
// Write an index into a tensor dim as digits of mixed radix. A cut into equal parts fixes one digit: it must be the
// coordinate on the cut's mesh dim. S(0) over a, then b, of 64 = 4 x 4 x 4 fixes the first digit by a and the second by
// b; SS(0, 4) over b alone fixes the second. So lists of cuts hold the same parts exactly if they fix the same digits
// by the same mesh dims, and what two lists share is a product over digits.
//
// Everything here costs the same however large the mesh and the tensor are.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// index / weight % radix == coordinate on mesh_dim
struct Digit {
  int64_t weight = 1;
  int64_t radix = 1;
  int mesh_dim = 0;
  bool operator==(const Digit&) const = default;
};

// The digits that these cuts fix, largest first. Nothing where parts differ in size, or where a cut takes a piece of
// what an earlier one fixed.
std::optional<std::vector<Digit>> digits_of(const Mesh& mesh, int64_t n, std::span<const Cut> cuts);

// Two lists of digits of n elements, taken apart into digits that both can be written in.
class Matching {
 public:
  static constexpr int kMaxDigits = 24;

  // coordinate / below % radix
  struct Owner {
    int mesh_dim = -1;  // nobody: all values of the digit are held
    int64_t below = 1;
    bool operator==(const Owner&) const = default;
  };
  struct Common {
    int64_t radix = 1;
    Owner before;
    Owner after;
    // Whether it is fixed in both, by different coordinates.
    bool is_tie() const { return before.mesh_dim >= 0 && after.mesh_dim >= 0 && !(before == after); }
    // Whether the rank at `position` has the same value of the digit in both, or any.
    bool agrees_at(const Mesh& mesh, int64_t position) const;
  };

  // Nothing where the digits of the one straddle those of the other.
  static std::optional<Matching> of(int64_t n, std::span<const Digit> before, std::span<const Digit> after);

  std::span<const Common> digits() const { return {digits_.data(), static_cast<size_t>(count_)}; }
  // Values of the digits that neither fixes.
  int64_t free() const { return free_; }

  // Parts of the first list that one of the second meets.
  int64_t sources() const;

  // Whether the rank at `position` holds any elements in both; then they are free().
  bool agrees_at(const Mesh& mesh, int64_t position) const;

 private:
  std::array<Common, kMaxDigits> digits_;
  int count_ = 0;
  int64_t free_ = 1;
};

// What ranks hold in both of two layouts of one tensor on one mesh.
class SharedElements {
 public:
  SharedElements(const Layout& before, const Layout& after);

  int64_t at(int64_t position) const;
  // Over all ranks, without a walk over them. Nothing where that takes too long.
  std::optional<int64_t> sum() const;

  // The mesh dims whose coordinates at() depends on.
  MeshDimSet varying_dims() const;

  // By tensor dim; empty where digits do not say it all.
  const std::vector<Matching>& matchings() const { return matchings_; }

 private:
  const Layout& before_;
  const Layout& after_;
  std::vector<Matching> matchings_;
};

}  // namespace shardwright
