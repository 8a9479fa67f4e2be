// In which round each part of each item of a batch travels.
//
// A round is what a rank packs into one bucket: all that it sends in the round, followed by all that it receives. Both
// together fit into a bucket, on every rank. All elements of one round have the same size, so messages need no padding.
//
// Items are taken in order, those with larger elements first. An item goes to the first open round in which it fits on
// all ranks that take part in it. Otherwise a *piece* of it goes to every round with room for an eighth of a bucket of
// it or more, on its busiest rank, and the rest to new rounds. A piece is a share of each of the item's messages: of n
// elements those in [n * begin / kWhole, n * end / kWhole), rounded down. So which elements a rank sends and receives
// in a round follows from the list of pieces and its own messages.
//
// Example: buckets of 100 bytes, and three items of bytes. The first sends 60 bytes from rank 0 to 1, the second 60
// from 1 to 2, the third 60 from 2 to 3.
//
//   round 0    first item, 60 bytes; second item, [0, 2/3), 40 bytes; third item, 60 bytes
//   round 1    second item, [2/3, 1), 20 bytes
//
// The pieces depend on the batch alone. Making them takes time in proportion to items times the ranks that take part in
// them, and never looks at messages.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

namespace shardwright {

// A part of an item that travels in one round.
struct ItemPiece {
  static constexpr int64_t kWhole = int64_t{1} << 40;

  int round = 0;
  int64_t begin = 0;  // of kWhole
  int64_t end = kWhole;
  bool operator==(const ItemPiece&) const = default;

  // Returns how many of the first elements of a message come before the mark `begin` or `end`.
  static int64_t before(int64_t mark, int64_t elements);
};

// The load of one rank in an item.
struct ItemLoad {
  int rank = 0;          // index into the ranks of the batch
  int64_t elements = 0;  // sent and received together, above 0
  int64_t messages = 0;  // sent and received together; or more, but not fewer
};

class Scheduler {
 public:
  // Rounds that are this far before the last one take no more items.
  static constexpr int kOpenRounds = 64;

  Scheduler(int64_t num_ranks, int64_t bucket_bytes);

  // Returns the pieces of an item, by round; none for an item without loads. Loads are given with the largest first.
  // Items must come with element sizes that do not grow. Throws UserError that names bucket_bytes and the item if the
  // item must be split and a bucket does not hold two elements for each message of a rank.
  std::vector<ItemPiece> add(int item, const std::vector<ItemLoad>& loads, int64_t element_bytes);

  int num_rounds() const { return first_open_ + static_cast<int>(open_.size()); }
  // The most bytes that any rank packs into a bucket.
  int64_t largest_round_bytes() const { return largest_round_bytes_; }

 private:
  using Used = std::vector<int64_t>;  // elements, by rank

  void open_round();
  void take(Used& used, const std::vector<ItemLoad>& loads, const ItemPiece& piece);

  int64_t num_ranks_;
  int64_t bucket_bytes_;
  int64_t element_bytes_ = 0;  // of the open rounds
  int first_open_ = 0;
  std::deque<Used> open_;  // by round, from first_open_
  int64_t largest_round_bytes_ = 0;
};

}  // namespace shardwright
