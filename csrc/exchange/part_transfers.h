// The messages between pairs of ranks on one mesh: number of elements, offsets and contiguity, round by round.
//
// Example: 8 x 8 elements move from S(0) to S(1) over a=4. Rank 1 has rows 2 and 3, and rank 3 needs columns 6 and 7.
// The message from 1 to 3 is {count 4, first_held 6, first_needed 4, is_contiguous_held false, is_contiguous_needed
// true}.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "exchange/group_move.h"

namespace shardwright {

// The extent of a message in one round.
struct Extent {
  int64_t count = 0;                  // number of elements
  int64_t first_held = 0;             // offset of the first element in the sender's row-major part
  int64_t first_needed = 0;           // offset of the first element in the receiver's row-major part
  bool is_contiguous_held = false;    // the elements are one run of the sender's part, in the order of the message
  bool is_contiguous_needed = false;  // the elements are one run of the receiver's part, in the order of the message
};

// A message from one rank to another, round by round. It must not outlive the PartTransfers that made it.
class Transfer {
 public:
  Transfer() = default;  // no elements
  // `rounds` has the extent of each round, with offsets relative to `whole`; null if one round sends all elements.
  Transfer(const Extent& whole, const std::vector<Extent>* rounds) : whole_(whole), rounds_(rounds) {}
  int64_t count() const { return whole_.count; }  // elements of all rounds
  // Returns the extent of the elements that this round sends. If a message is sent in several rounds or is a range of
  // the common elements, offsets are only valid on a side on which the elements are contiguous.
  Extent in_round(int64_t round) const;
  bool is_contiguous_in_some_round() const;  // true if elements are contiguous in some round, on some side

 private:
  Extent whole_;
  const std::vector<Extent>* rounds_ = nullptr;  // offsets are relative to whole_; null: one round
};

// Returns a key that is equal for two piece lists only if they are the same except for a shift.
std::vector<int64_t> key_up_to_shift(const PieceList& pieces);

// Computes messages from the parts of their ranks. Caches results. The move must outlive the object.
class PartTransfers {
 public:
  using PartsOfRank = KnownParts::PartsOfRank;

  explicit PartTransfers(GroupMove& move) : move_(move) {}

  // Returns the extent of the elements that a rank holds before and needs after.
  Extent kept(int64_t position) { return common_extent(move_.held.of_rank(position), move_.needed.of_rank(position)); }
  // Returns the message of all elements that the rank at position `from` holds and the rank at `to` needs, or of a
  // range of them in packed order.
  Transfer between(int64_t from, int64_t to, std::optional<Interval> range = std::nullopt);
  // Returns the message of all elements in both of two parts. `runs` has the common runs of each tensor dim.
  Transfer of_parts(const PartsOfRank& held, const PartsOfRank& needed, std::span<const SharedRuns> runs);

 private:
  // Return the extent of all common elements of two parts.
  Extent common_extent(const PartsOfRank& held, const PartsOfRank& needed);
  static Extent common_extent(const PartsOfRank& held, const PartsOfRank& needed, std::span<const SharedRuns> runs);
  // Returns a message, divided into rounds. `whole` is the extent of all common elements of the two parts, and `range`
  // the part of them that the message has.
  Transfer divided_into_rounds(const PartsOfRank& held, const PartsOfRank& needed, const Extent& whole, Interval range);

  GroupMove& move_;
  std::vector<SharedRuns> runs_;                                       // scratch of common_extent(), by tensor dim
  std::map<std::vector<int64_t>, std::vector<Extent>> round_extents_;  // keys: all values that rounds depend on
};

}  // namespace shardwright
