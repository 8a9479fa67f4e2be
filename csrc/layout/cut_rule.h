// How one mesh dim divides a list of elements among its coordinates.
//
// A rule divides n local positions among k coordinates; each position goes to exactly one coordinate. Everything that
// depends on how a mesh dim cuts asks the rule, so that another kind of rule can be added in one place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
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
  CutRule(int64_t split_factor = 1) : number_(split_factor) {}  // a number alone is a rule: Cut{mesh_dim, 2}

  // Other rules. These functions throw UserError on numbers that are out of range.
  //
  // Coordinate c gets the next sizes[c] elements. There is a size for each coordinate, and they sum to n.
  static CutRule ragged(const std::vector<int64_t>& sizes);
  // Chunks of whole blocks: torch.chunk of the list of blocks, the last of which may be short.
  static CutRule blocks(int64_t block);
  // Coordinate c gets blocks c, c + k, c + 2k, ...; the last may be short.
  static CutRule cyclic(int64_t block);
  // One coordinate gets everything.
  static CutRule owned(int64_t coordinate);
  // The list is several components in one, of sizes that sum to n; each is cut into chunks by itself, and a coordinate
  // gets a chunk of every one.
  static CutRule packed(const std::vector<int64_t>& sizes);

  static constexpr int64_t kMaxBlock = int64_t{1} << 31;
  // Parts of more runs are refused: their lists take too much memory.
  static constexpr int64_t kMaxRuns = int64_t{1} << 20;

  bool is_strided_or_chunks() const { return kind_ == Kind::kStrided; }
  bool is_chunks() const { return is_strided_or_chunks() && number_ == 1; }
  // Of chunks (1) and strided cuts.
  int64_t split_factor() const { return number_; }

  // Why it cannot cut a list of n elements over k coordinates; empty where it can. Nothing below may be asked where it
  // cannot.
  std::string why_not(int64_t n, int64_t k) const;
  // The same of any list over k coordinates.
  std::string why_not_over(int64_t k) const;

  // ---- what a coordinate gets

  // Of a list; ascending and without touching neighbours, as the list is.
  IntervalList part(const IntervalList& list, int64_t k, int64_t coordinate) const;
  // How much that is, of a list of n elements.
  int64_t length(int64_t n, int64_t k, int64_t coordinate) const;
  // Into how many runs a part of n elements without gaps falls, at most.
  int64_t runs(int64_t n, int64_t k) const;

  // ---- all coordinates together

  bool cuts_evenly(int64_t n, int64_t k) const {
    return is_strided_or_chunks() ? n % (number_ * k) == 0 : cuts_evenly_otherwise(n, k);
  }
  // A coordinate that gets no less than any other, and one that gets no more.
  int64_t largest(int64_t n, int64_t k) const;
  int64_t smallest(int64_t n, int64_t k) const;
  // Whether no coordinate gets more than the one before it.
  bool descends() const { return kind_ != Kind::kRagged && kind_ != Kind::kOwned; }
  // Whether the largest part of a list is no smaller than that of any shorter list.
  bool longer_lists_have_larger_parts() const { return is_chunks() || !is_strided_or_chunks(); }
  // Whether parts are runs, in the order of coordinates.
  bool makes_runs() const {
    return is_chunks() || kind_ == Kind::kRagged || kind_ == Kind::kBlocks || kind_ == Kind::kOwned;
  }
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

  // Numbers that no other rule has, in a form that nothing else begins with; and the rule that has them.
  void append_name(std::vector<int64_t>& name) const;
  static CutRule from_name(const std::vector<int64_t>& name);  // throws UserError
  size_t hash() const;
  bool operator==(const CutRule& other) const;

  // What a placement that cuts this way is called: "S(0)", "SS(0,2)", "Ragged(0,3:1:4)", "Blocks(0,128)",
  // "Cyclic(0,2)", "Owned(0,1)", "Packed(0,8:4:4)".
  std::string text(int64_t tensor_dim) const;

 private:
  enum class Kind : uint8_t { kStrided, kRagged, kBlocks, kCyclic, kOwned, kPacked };

  CutRule(Kind kind, int64_t number, const std::vector<int64_t>& sizes = {});

  template <typename Visit>
  void for_each_range(int64_t n, int64_t k, int64_t coordinate, const Visit& visit) const;
  bool cuts_evenly_otherwise(int64_t n, int64_t k) const;
  int64_t chunk_of_blocks(int64_t n, int64_t k) const;  // of chunks and blocks
  // Of ragged and packed: where the elements of a coordinate or component begin and end.
  Interval component(size_t i) const { return {i == 0 ? 0 : (*ends_)[i - 1], (*ends_)[i]}; }
  std::vector<int64_t> sizes() const;

  Kind kind_ = Kind::kStrided;
  int64_t number_ = 1;  // the split factor, the block or the owner
  std::shared_ptr<const std::vector<int64_t>> ends_;
};

}  // namespace shardwright
