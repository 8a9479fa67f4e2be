// The rule by which one mesh dim divides a list of elements among its coordinates.
//
// A rule divides n local positions among k coordinates. Everything that depends on how a mesh dim cuts asks the rule,
// so that another kind of rule can be added in one place.
//
// Invariant of all rules but `pieces`: each position goes to exactly one coordinate, and a part is ascending as its
// list is. A rule of pieces may break both; is_partition() says whether it does. Every position goes to some
// coordinate, and to none of them twice. Layouts with a rule that is no partition are moved by rearrangements
// (exchange/indexed_exchange.h).
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
  // gets a chunk of every one. With a unit, chunks are of whole units, as in `blocks`.
  static CutRule packed(const std::vector<int64_t>& sizes, int64_t unit = 1);
  // Coordinate c gets these intervals in this order. n is where the last one ends; several coordinates may have the
  // same position, but some coordinate has each. Empty intervals are left out.
  static CutRule pieces(const std::vector<std::vector<Interval>>& lists);

  static constexpr int64_t kMaxBlock = int64_t{1} << 31;
  // Parts of more runs are refused: their lists take too much memory.
  static constexpr int64_t kMaxRuns = int64_t{1} << 20;

  bool is_strided_or_chunks() const { return kind_ == Kind::kStrided; }
  bool is_chunks() const { return is_strided_or_chunks() && number_ == 1; }
  // Returns whether each position goes to one coordinate only, and parts ascend.
  bool is_partition() const { return kind_ != Kind::kPieces || pieces_->is_partition; }
  // The split factor of a strided cut; 1 for chunks. Other rules have none.
  int64_t split_factor() const { return number_; }

  // Returns why the rule cannot cut a list of n elements over k coordinates, or an empty string if it can. The
  // functions below may only be called if it can.
  std::string why_not(int64_t n, int64_t k) const;
  // Returns why the rule cannot cut any list over k coordinates, or an empty string if it can cut some.
  std::string why_not_over(int64_t k) const;

  // ---- what a coordinate gets

  // Returns the part of a list that a coordinate gets. Its intervals ascend and do not touch, like those of the list;
  // the part of a rule of pieces is in the order of its pieces.
  IntervalList part(const IntervalList& list, int64_t k, int64_t coordinate) const;
  // Returns the length of a coordinate's part of a list of n elements.
  int64_t length(int64_t n, int64_t k, int64_t coordinate) const;
  // Returns the most runs that a part has, if the list of n elements has no gaps.
  int64_t runs(int64_t n, int64_t k) const;

  // ---- all coordinates together

  bool cuts_evenly(int64_t n, int64_t k) const {
    return is_strided_or_chunks() ? n % (number_ * k) == 0 : cuts_evenly_otherwise(n, k);
  }
  // Return a coordinate whose part is no smaller than any other, and one whose part is no larger.
  int64_t largest(int64_t n, int64_t k) const;
  int64_t smallest(int64_t n, int64_t k) const;
  // Returns whether no coordinate gets more than the coordinate before it.
  bool descends() const { return kind_ != Kind::kRagged && kind_ != Kind::kOwned && kind_ != Kind::kPieces; }
  // Returns whether the largest part of a list is at least as long as the largest part of any shorter list.
  bool longer_lists_have_larger_parts() const { return is_chunks() || !is_strided_or_chunks(); }
  // Returns whether each part is one run of the list, with the runs in the order of the coordinates.
  bool makes_runs() const {
    return is_chunks() || kind_ == Kind::kRagged || kind_ == Kind::kBlocks || kind_ == Kind::kOwned;
  }
  // Returns the coordinates that may get some position of a range, which must not be empty.
  Interval coordinates_of(Interval range, int64_t n, int64_t k) const;
  // Returns the coordinates whose part looks different from the part before it: it has runs of other lengths or at
  // other distances.
  std::vector<int64_t> starts_of_like_parts(int64_t n, int64_t k) const;

  // ---- its place among other cuts

  // If parts are equally long and some strided cut makes the same ones, returns the split factor of that cut. Digits
  // (exchange/digits.h) and canonical names are made from it.
  std::optional<int64_t> equal_split_factor(int64_t n, int64_t k) const;
  // Returns the rule that makes the same parts once the cut right before it, over k coordinates, is gathered; nothing
  // if there is no such rule.
  std::optional<CutRule> with_gathered(const CutRule& earlier, int64_t k) const;
  // Returns the rule that makes the same parts, all equally long, if the cut right after this one, over k coordinates,
  // comes before it instead; nothing if there is no such rule.
  std::optional<CutRule> moved_after(const CutRule& later, int64_t k) const;

  // append_name appends numbers that identify the rule; no rule's numbers are the beginning of another's. from_name
  // returns the rule that has these numbers.
  void append_name(std::vector<int64_t>& name) const;
  static CutRule from_name(const std::vector<int64_t>& name);  // throws UserError
  size_t hash() const;
  bool operator==(const CutRule& other) const;

  // Returns the name of a placement that cuts this way: "S(0)", "SS(0,2)", "Ragged(0,3:1:4)", "Blocks(0,128)",
  // "Cyclic(0,2)", "Owned(0,1)", "Packed(0,8:4:4)", "Packed(0,8:4:4,2)", "Pieces(0,0-2+6-8:2-6)".
  std::string text(int64_t tensor_dim) const;

 private:
  enum class Kind : uint8_t { kStrided, kRagged, kBlocks, kCyclic, kOwned, kPacked, kPieces };

  struct Pieces {
    std::vector<IntervalList> lists;  // by coordinate
    int64_t n = 0;
    bool is_partition = true;
    bool operator==(const Pieces&) const = default;
  };

  CutRule(Kind kind, int64_t number, const std::vector<int64_t>& sizes = {});

  IntervalList positions(int64_t n, int64_t k, int64_t coordinate, int64_t first) const;
  bool cuts_evenly_otherwise(int64_t n, int64_t k) const;
  static std::optional<std::vector<std::vector<Interval>>> lists_from_name(const std::vector<int64_t>& name);
  // The length of a whole chunk; for chunks, blocks and a packed component only.
  int64_t chunk_of_blocks(int64_t n, int64_t k) const;
  // The begin and end of the elements of a coordinate (ragged) or component (packed).
  Interval component(size_t i) const { return {i == 0 ? 0 : (*ends_)[i - 1], (*ends_)[i]}; }
  // Of ragged and packed: how many each has; of pieces, how many each coordinate has.
  std::vector<int64_t> sizes() const;

  Kind kind_ = Kind::kStrided;
  int64_t number_ = 1;  // the split factor, the block, the owner or the unit
  std::shared_ptr<const std::vector<int64_t>> ends_;
  std::shared_ptr<const Pieces> pieces_;
};

}  // namespace shardwright
