// The rule by which one mesh dim divides a list of elements among its coordinates.
//
// All code that depends on how a mesh dim cuts calls CutRule, so a new kind of rule is added in one place.
//
//   n            number of elements in the list that is cut: a tensor dim, or the part that earlier cuts left of it
//   k            number of coordinates: the size of the mesh dim
//   position     index into the list, in [0, n)
//   part         the elements that one coordinate gets
//   run          elements of a part that are adjacent in the list
//
// Invariants:
//   - Every position goes to at least one coordinate, and to no coordinate twice.
//   - If is_partition(), every position goes to exactly one coordinate, and parts of an ascending list ascend. Only
//     `pieces` can make a rule that is not a partition. Layouts with such a rule are moved by rearrangements
//     (exchange/indexed_exchange.h).
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
  // The constructor is implicit, so that Cut{mesh_dim, 2} has a strided rule. The factor must be at least 1; only
  // Layout checks it.
  CutRule(int64_t split_factor = 1) : parameter_(split_factor) {}

  // The functions below make the other rules. They throw UserError if a number is out of range, or if there are no
  // sizes or no lists. Whether the rule fits a list is checked later, by why_not().
  //
  // Coordinate c gets the next sizes[c] elements. `sizes` has one entry per coordinate and sums to n.
  static CutRule ragged(const std::vector<int64_t>& sizes);
  // Chunks of whole blocks, as torch.chunk of the list of blocks. The last block may be short.
  static CutRule blocks(int64_t block);
  // Coordinate c gets blocks c, c + k, c + 2k, ... The last block may be short.
  static CutRule cyclic(int64_t block);
  // One coordinate gets everything.
  static CutRule owned(int64_t coordinate);
  // The list is a concatenation of components whose sizes sum to n. Each component is cut into chunks by itself, and
  // coordinate c gets chunk c of each. With a unit, chunks are of whole units, as in `blocks`.
  static CutRule packed(const std::vector<int64_t>& sizes, int64_t unit = 1);
  // Coordinate c gets the intervals lists[c], in this order. n is the largest end. Every position must be in some list,
  // and may be in the lists of several coordinates, but only once in each list; otherwise throws UserError. Empty
  // intervals are dropped.
  static CutRule pieces(const std::vector<std::vector<Interval>>& lists);

  static constexpr int64_t kMaxBlock = int64_t{1} << 31;  // elements of a block or unit
  static constexpr int64_t kMaxRuns = int64_t{1} << 20;   // runs of a part; longer lists take too much memory

  bool is_strided_or_chunks() const { return kind_ == Kind::kStrided; }
  bool is_chunks() const { return is_strided_or_chunks() && parameter_ == 1; }
  // True if each position goes to exactly one coordinate, and parts ascend.
  bool is_partition() const { return kind_ != Kind::kPieces || pieces_->is_partition; }
  // Returns the split factor of a strided cut, 1 for chunks. For other rules, the result has no meaning.
  int64_t split_factor() const { return parameter_; }

  // Returns the reason if the rule cannot cut a list of n elements over k coordinates, else an empty string. A reason
  // has the form "coordinate must be in [0, 1], got 2", with a number of the rule as its subject. The functions below
  // may only be called if the string is empty.
  std::string why_not(int64_t n, int64_t k) const;
  // Returns the reason if the rule cannot cut any list over k coordinates, else an empty string.
  std::string why_not_over(int64_t k) const;

  // ---- The part of one coordinate

  // Returns the part of `list` that a coordinate gets. Its intervals ascend and do not touch, as in `list`. With a rule
  // of pieces, they are in the order of the pieces.
  IntervalList part(const IntervalList& list, int64_t k, int64_t coordinate) const;
  // Returns the length of a coordinate's part of a list of n elements.
  int64_t length(int64_t n, int64_t k, int64_t coordinate) const;
  // Returns an upper bound on the number of runs of a part, for a list of n elements without gaps. Parts of strided and
  // packed rules may have fewer.
  int64_t runs(int64_t n, int64_t k) const;

  // ---- The parts of all coordinates

  // True only if all parts have the same length. The result may be false although they have, if the pieces of a strided
  // rule or the components of a packed rule are not cut evenly.
  bool cuts_evenly(int64_t n, int64_t k) const {
    return is_strided_or_chunks() ? n % (parameter_ * k) == 0 : cuts_evenly_otherwise(n, k);
  }
  // Return a coordinate whose part is the longest, and a coordinate whose part is the shortest.
  int64_t coordinate_of_largest(int64_t n, int64_t k) const;
  int64_t coordinate_of_smallest(int64_t n, int64_t k) const;
  // True if no coordinate gets more than the coordinate before it, whatever n and k are.
  bool descends() const { return kind_ != Kind::kRagged && kind_ != Kind::kOwned && kind_ != Kind::kPieces; }
  // True if the largest part of a list is at least as long as the largest part of any shorter list.
  bool longer_lists_have_larger_parts() const { return is_chunks() || !is_strided_or_chunks(); }
  // True if each part is one run of the list, and the runs are in the order of the coordinates.
  bool makes_runs() const {
    return is_chunks() || kind_ == Kind::kRagged || kind_ == Kind::kBlocks || kind_ == Kind::kOwned;
  }
  // Returns a range of coordinates that contains every coordinate whose part has a position in `range`, and perhaps
  // more. `range` must not be empty.
  Interval coordinates_of(Interval range, int64_t n, int64_t k) const;
  // Returns 0 and each coordinate whose part is not a shifted copy of the previous coordinate's part.
  std::vector<int64_t> starts_of_like_parts(int64_t n, int64_t k) const;

  // ---- Composition with other cuts

  // Returns the split factor of the strided cut that makes the same parts as this rule. Returns nullopt if parts differ
  // in length, if the rule is not a partition, or if there is no such cut. Digits (exchange/digits.h) and canonical
  // forms are made from it.
  std::optional<int64_t> equal_split_factor(int64_t n, int64_t k) const;
  // Returns the rule that this cut needs after the previous cut (`earlier`, over k coordinates) is gathered, so that a
  // coordinate of this cut has the same elements as before on all k coordinates together. Returns nullopt if there is
  // none. Valid only for parts of equal lengths. Example: 12 elements in chunks over a=2, then in chunks over b=2. All
  // ranks with coordinate 0 on b have [0, 3) and [6, 9) together: its part by SS with split factor 2.
  std::optional<CutRule> with_gathered(const CutRule& earlier, int64_t k) const;
  // Swaps this cut with the next cut (`later`, over k coordinates), which keeps its rule. Returns the rule that this
  // cut needs after the swap so that the two cuts make the same parts, or nullopt if there is none. Valid only for
  // parts of equal lengths. Example with |b| = 2: SS(0,2) over a, then S(0) over b, makes the same parts as S(0) over
  // b, then S(0) over a. So SS(0,2) becomes S(0).
  std::optional<CutRule> moved_after(const CutRule& later, int64_t k) const;

  // Appends integers that encode the rule.
  void append_encoding(std::vector<int64_t>& encoding) const;
  // Returns the rule that append_encoding() encoded. Throws UserError if the encoding is malformed.
  static CutRule from_encoding(const std::vector<int64_t>& encoding);
  size_t hash() const;
  bool operator==(const CutRule& other) const;

  // Returns the placement that cuts a tensor dim by this rule, as text: "S(0)", "SS(0,2)", "Ragged(0,3:1:4)",
  // "Blocks(0,128)", "Cyclic(0,2)", "Owned(0,1)", "Packed(0,8:4:4)", "Packed(0,8:4:4,2)", "Pieces(0,0-2+6-8:2-6)".
  std::string text(int64_t tensor_dim) const;

 private:
  enum class Kind : uint8_t { kStrided, kRagged, kBlocks, kCyclic, kOwned, kPacked, kPieces };

  // The intervals of a rule of pieces.
  struct Pieces {
    std::vector<IntervalList> lists;  // by coordinate
    int64_t n = 0;                    // the largest end of an interval
    bool is_partition = true;         // no position has two coordinates, and every list ascends
    bool operator==(const Pieces&) const = default;
  };

  CutRule(Kind kind, int64_t parameter, const std::vector<int64_t>& sizes = {});

  IntervalList positions(int64_t n, int64_t k, int64_t coordinate, int64_t first) const;
  bool cuts_evenly_otherwise(int64_t n, int64_t k) const;  // cuts_evenly() of rules that are not strided
  static std::optional<std::vector<std::vector<Interval>>> lists_from_encoding(const std::vector<int64_t>& encoding);
  // Returns the length of a full chunk. Only for chunks, blocks and one component of a packed rule.
  int64_t chunk_length(int64_t n, int64_t k) const;
  // Returns the elements of coordinate i (ragged) or of component i (packed).
  Interval component(size_t i) const { return {i == 0 ? 0 : (*ends_)[i - 1], (*ends_)[i]}; }
  // Returns the number of elements of each coordinate (ragged, pieces) or component (packed). Only for these rules.
  std::vector<int64_t> sizes() const;

  Kind kind_ = Kind::kStrided;
  int64_t parameter_ = 1;                             // split factor, block size, owner or unit
  std::shared_ptr<const std::vector<int64_t>> ends_;  // prefix sums of sizes: only ragged and packed
  std::shared_ptr<const Pieces> pieces_;              // only pieces
};

}  // namespace shardwright
