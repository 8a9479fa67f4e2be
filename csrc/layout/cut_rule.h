// How one mesh dim divides a list of elements among its coordinates.
//
// A rule sees n local positions and k coordinates, and gives each coordinate some of the positions, each position to
// one coordinate. Whatever depends on how a mesh dim cuts asks the rule, so that another kind of rule has one place to
// be added.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layout/region.h"

namespace shardwright {

class CutRule {
 public:
  // Chunks as torch.chunk makes them: ceil(n / k) elements each, trailing ones may be short or empty.
  //     5 elements, k = 2: [0,3) [3,5)          2 elements, k = 4: [0,1) [1,2) [] []
  // With a split factor f > 1, DTensor's _StridedShard: chunk into f pieces, chunk each piece into k, and take one
  // chunk of every piece.
  //     8 elements, k = 2, f = 2: [0,2)[4,6)  [2,4)[6,8)
  CutRule(int64_t split_factor = 1) : split_factor_(split_factor) {}  // a number alone is a rule: Cut{mesh_dim, 2}

  bool is_chunks() const { return split_factor_ == 1; }
  // Of chunks (1) and strided cuts.
  int64_t split_factor() const { return split_factor_; }

  // ---- what a coordinate gets

  // Of a list; ascending and without touching neighbours, as the list is.
  IntervalList part(const IntervalList& list, int64_t k, int64_t coordinate) const;
  // How much that is, of a list of n elements.
  int64_t length(int64_t n, int64_t k, int64_t coordinate) const;
  // Into how many runs a part of n elements without gaps falls, at most.
  int64_t runs(int64_t n, int64_t k) const;

  // ---- all coordinates together

  bool cuts_evenly(int64_t n, int64_t k) const { return n % (split_factor_ * k) == 0; }
  // A coordinate that gets no less than any other.
  int64_t largest(int64_t n, int64_t k) const;
  // Whether the largest part of a list is no smaller than that of any shorter list.
  bool longer_lists_have_larger_parts() const { return is_chunks(); }
  // Whether parts are runs, in the order of coordinates.
  bool makes_runs() const { return is_chunks(); }
  // The coordinates that may get some of the positions in a range. The range is not empty.
  Interval coordinates_of(Interval range, int64_t n, int64_t k) const;
  // The coordinates at which parts begin to look different from the one before: other runs, or at other distances.
  std::vector<int64_t> starts_of_like_parts(int64_t n, int64_t k) const;

  // ---- its place among other cuts

  // The split factor of the strided cut that makes the same parts, if these are equal: what digits (moves/digits.h)
  // and canonical names go by.
  std::optional<int64_t> equal_split_factor(int64_t n, int64_t k) const;
  // The rule as it reads once a cut right before it, over k coordinates, is gathered. Nothing where no rule says it.
  std::optional<CutRule> with_gathered(const CutRule& earlier, int64_t k) const;
  // The rule that makes the same equal parts if the cut right behind this one, over k coordinates, comes before it
  // instead. Nothing where no rule does.
  std::optional<CutRule> behind(const CutRule& later, int64_t k) const;

  // Numbers that no other rule has, in a form that nothing else begins with.
  void append_name(std::vector<int64_t>& name) const { name.push_back(split_factor_); }
  size_t hash() const { return static_cast<size_t>(split_factor_); }
  bool operator==(const CutRule&) const = default;

 private:
  template <typename Visit>
  void for_each_range(int64_t n, int64_t k, int64_t coordinate, const Visit& visit) const;

  int64_t split_factor_;
};

}  // namespace shardwright
