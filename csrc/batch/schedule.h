// Assigns the parts of each item of a batch to rounds.
//
// In a round, a rank uses one bucket for all data that it sends, followed by all data that it receives. On every rank,
// both together fit into the bucket. All elements of a round have the same size, so messages need no padding.
//
// Items are assigned in order, larger element sizes first. An item is assigned to the first open round in which it fits
// on all ranks that send or receive it. If there is none, the item is split into *pieces*: each open round with room
// for at least an eighth of a bucket, on the item's busiest rank, gets a piece, and new rounds get the remainder. A
// piece is the same share of each message of the item: the elements [n * begin / kWhole, n * end / kWhole) of a message
// of n elements, rounded down. So the list of pieces and a rank's own messages determine the elements that the rank
// sends and receives in a round.
//
// Example: buckets of 100 bytes, and three items of bytes. The first sends 60 bytes from rank 0 to 1, the second 60
// from 1 to 2, the third 60 from 2 to 3.
//
//   round 0    first item, 60 bytes; second item, [0, 2/3), 40 bytes, which fill rank 1's bucket; third item, 60 bytes
//   round 1    second item, [2/3, 1), 20 bytes
//
// The pieces depend on the batch alone. The time is proportional to the number of items times the ranks that send
// or receive them, and does not depend on the number of messages.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

namespace shardwright {

// A part of an item that is sent in one round.
struct ItemPiece {
  static constexpr int64_t kWhole = int64_t{1} << 40;  // the mark at the end of a message

  int round = 0;
  int64_t begin = 0;  // in units of 1/kWhole of a message
  int64_t end = kWhole;
  bool operator==(const ItemPiece&) const = default;

  // Returns the number of elements before a mark (the `begin` or `end` of a piece) in a message of `elements` elements.
  static int64_t before(int64_t mark, int64_t elements);
};

// The load of one rank in an item.
struct ItemLoad {
  int rank = 0;          // index into the ranks of the batch
  int64_t elements = 0;  // sent and received together, above 0
  int64_t messages = 0;  // upper bound on the number of messages sent and received together
};

// Assigns items to rounds, one item after the other. A round is *open* while items may still be added to it.
class Scheduler {
 public:
  // Maximum number of open rounds. A new round closes the earliest open one.
  static constexpr int kOpenRounds = 64;

  // `num_ranks` is the number of ranks of the batch, `bucket_bytes` the maximum size of a bucket.
  Scheduler(int64_t num_ranks, int64_t bucket_bytes);

  // Assigns an item to rounds and returns its pieces, by ascending round; an item without loads has none. `item`
  // is the number of the item in errors. `loads` has the largest load first. Throws InvariantError if `element_bytes`
  // is larger than that of an earlier item. Throws UserError that names bucket_bytes and the item if the item is larger
  // than a bucket and the bucket does not hold two elements of each message of a rank.
  std::vector<ItemPiece> add(int item, const std::vector<ItemLoad>& loads, int64_t element_bytes);

  // Returns the number of rounds so far, open and closed.
  int num_rounds() const { return first_open_ + static_cast<int>(open_.size()); }
  // Returns an upper bound on the bytes that any rank packs into a bucket in one round; 0 without rounds.
  int64_t largest_round_bytes() const { return largest_round_bytes_; }

 private:
  using Used = std::vector<int64_t>;  // by rank: the number of elements in the bucket so far

  // Appends a round. Closes the earliest open round if there are more than kOpenRounds.
  void open_round();
  // Adds a piece's elements to a round, and updates largest_round_bytes_.
  void add_piece(Used& used, const std::vector<ItemLoad>& loads, const ItemPiece& piece);

  int64_t num_ranks_;
  int64_t bucket_bytes_;
  int64_t element_bytes_ = 0;  // size of the elements of the open rounds
  int first_open_ = 0;         // number of the first open round
  std::deque<Used> open_;      // the open rounds, from first_open_ on
  int64_t largest_round_bytes_ = 0;
};

}  // namespace shardwright
