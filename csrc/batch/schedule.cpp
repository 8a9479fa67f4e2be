#include "batch/schedule.h"

#include <algorithm>

#include "support/error.h"

namespace shardwright {
namespace {

// A mark is a position in a message, in units of 1/kWhole of its length. Bounds of pieces are marks.
constexpr int64_t kWhole = ItemPiece::kWhole;

// Returns a * b / c, rounded down. The product may exceed 64 bits.
int64_t scaled(int64_t a, int64_t b, int64_t c) { return static_cast<int64_t>(static_cast<__int128>(a) * b / c); }

// Returns an upper bound on the elements that a rank packs for a piece. Both ends are rounded down in each message, so
// a piece that does not begin at 0 may have one element more of each message than its share.
int64_t elements_at_most(const ItemLoad& load, int64_t begin, int64_t end) {
  if (begin == 0) return end == kWhole ? load.elements : scaled(load.elements, end, kWhole);
  return std::min(load.elements, scaled(load.elements, end - begin, kWhole) + load.messages);
}

// Returns the last mark at which a piece that begins at `begin` may end to have at most `room` elements; `begin` if no
// element fits.
int64_t last_mark(const ItemLoad& load, int64_t begin, int64_t room) {
  if (elements_at_most(load, begin, kWhole) <= room) return kWhole;
  if (begin == 0) return scaled(room, kWhole, load.elements);
  return room <= load.messages ? begin : begin + scaled(room - load.messages, kWhole, load.elements);
}

}  // namespace

int64_t ItemPiece::before(int64_t mark, int64_t elements) {
  if (mark == kWhole) return elements;
  return mark == 0 ? 0 : scaled(elements, mark, kWhole);
}

Scheduler::Scheduler(int64_t num_ranks, int64_t bucket_bytes) : num_ranks_(num_ranks), bucket_bytes_(bucket_bytes) {}

void Scheduler::open_round() {
  open_.emplace_back(num_ranks_, 0);
  if (open_.size() > kOpenRounds) {
    open_.pop_front();
    ++first_open_;
  }
}

void Scheduler::add_piece(Used& used, const std::vector<ItemLoad>& loads, const ItemPiece& piece) {
  int64_t largest = 0;
  for (const ItemLoad& load : loads) {
    int64_t& elements = used[load.rank];
    elements += elements_at_most(load, piece.begin, piece.end);
    largest = std::max(largest, elements);
  }
  largest_round_bytes_ = std::max(largest_round_bytes_, largest * element_bytes_);
}

std::vector<ItemPiece> Scheduler::add(int item, const std::vector<ItemLoad>& loads, int64_t element_bytes) {
  if (loads.empty()) return {};
  if (element_bytes != element_bytes_) {
    check_invariant(element_bytes_ == 0 || element_bytes < element_bytes_, "item ", item, " has elements of ",
                    element_bytes, " bytes and follows an item with elements of ", element_bytes_, " bytes");
    first_open_ = num_rounds();
    open_.clear();
    element_bytes_ = element_bytes;
  }
  const int64_t bucket = bucket_bytes_ / element_bytes;
  const int64_t busiest = loads.front().elements;
  int64_t messages = 0;
  for (const ItemLoad& load : loads) messages = std::max(messages, load.messages);
  const bool can_split = bucket >= 2 * messages;
  check_user(busiest <= bucket || can_split, "bucket_bytes must be at least ", 2 * messages * element_bytes, ", got ",
             bucket_bytes_, ": item ", item, " must be split, and a bucket must hold 2 elements of each of up to ",
             messages, " messages");

  // Returns the last mark at which a piece that begins at `begin` may end in a round with this use. Returns `begin` if
  // the piece would be smaller than an eighth of a bucket, or with `only_whole` if it would end before kWhole.
  const auto last_mark_in = [&](const Used& used, int64_t begin, bool only_whole) {
    int64_t end = kWhole;
    for (const ItemLoad& load : loads) {
      end = std::min(end, last_mark(load, begin, bucket - used[load.rank]));
      if (end < kWhole && (only_whole || scaled(busiest, end - begin, kWhole) < bucket / 8)) return begin;
    }
    return end;
  };
  // Tries the first open round in which the item fits unsplit.
  for (size_t r = 0; r < open_.size() && busiest <= bucket; ++r) {
    if (last_mark_in(open_[r], 0, true) < kWhole) continue;
    const ItemPiece unsplit{first_open_ + static_cast<int>(r), 0, kWhole};
    add_piece(open_[r], loads, unsplit);
    return {unsplit};
  }
  // Otherwise splits it over all open rounds with room, then new rounds.
  std::vector<ItemPiece> pieces;
  int64_t begin = 0;
  for (int round = first_open_; begin < kWhole; ++round) {
    if (round == num_rounds()) open_round();
    Used& used = open_[round - first_open_];
    const int64_t end = last_mark_in(used, begin, !can_split);
    if (end <= begin) continue;
    pieces.push_back({round, begin, end});
    add_piece(used, loads, pieces.back());
    begin = end;
  }
  return pieces;
}

}  // namespace shardwright
