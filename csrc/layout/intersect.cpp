// Implements the functions of region.h that take two lists. A *piece* is a run of indices that lists a and b share
// (Piece in region.h). Lists without stored repetitions are merged; other lists go through layout/periodic_runs.h.
#include <algorithm>
#include <span>
#include <utility>

#include "layout/periodic_runs.h"
#include "layout/region.h"

namespace shardwright {
namespace {

// Merges pieces that are adjacent in both lists. add() takes the pieces in order. visit(piece) is called for each
// merged piece; the destructor calls it for the last.
template <typename Visit>
class PieceMerger {
 public:
  explicit PieceMerger(const Visit& visit) : visit_(visit) {}
  ~PieceMerger() {
    if (last_.length > 0) visit_(last_);
  }
  PieceMerger(const PieceMerger&) = delete;
  PieceMerger& operator=(const PieceMerger&) = delete;

  void add(const Piece& piece) {
    if (last_.length > 0 && last_.is_followed_by(piece)) return last_.lengthen(piece.length);
    if (last_.length > 0) visit_(last_);
    last_ = piece;
  }

 private:
  const Visit& visit_;
  Piece last_;
};

// Calls visit(piece) for the shared runs of two ascending lists without repetitions, in one pass over both.
template <typename Visit>
void for_each_shared_run_ascending(std::span<const Interval> a, std::span<const Interval> b, const Visit& visit) {
  PieceMerger<Visit> merger(visit);
  size_t i = 0;
  size_t j = 0;
  int64_t a_position = 0;
  int64_t b_position = 0;
  while (i < a.size() && j < b.size()) {
    const int64_t begin = std::max(a[i].begin, b[j].begin);
    const int64_t end = std::min(a[i].end, b[j].end);
    if (begin < end) merger.add({end - begin, a_position + begin - a[i].begin, b_position + begin - b[j].begin});
    if (a[i].end <= b[j].end) {
      a_position += a[i].end - a[i].begin;
      ++i;
    } else {
      b_position += b[j].end - b[j].begin;
      ++j;
    }
  }
}

// Returns the intervals of a list by ascending index. Keys are indices, values are local positions.
std::vector<KeyRun> ascending_runs(const IntervalList& list) {
  std::vector<KeyRun> runs;
  int64_t position = 0;
  for (const Interval& interval : list) {
    runs.push_back({interval.begin, interval.extent(), position});
    position += interval.extent();
  }
  std::sort(runs.begin(), runs.end(), [](const KeyRun& a, const KeyRun& b) { return a.key < b.key; });
  return runs;
}

// Calls visit(piece) for pieces in any order, sorted by their position in b and merged.
template <typename Visit>
void visit_in_order_of_b(std::vector<Piece> pieces, const Visit& visit) {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.b_position < b.b_position; });
  PieceMerger<Visit> merger(visit);
  for (const Piece& piece : pieces) merger.add(piece);
}

// Calls visit(piece) for the shared runs in the order of b. If both lists ascend, neither may have repetitions.
template <typename Visit>
void for_each_shared_run(const IntervalList& a, const IntervalList& b, const Visit& visit) {
  if (is_ascending(a) && is_ascending(b)) return for_each_shared_run_ascending(a.stored(), b.stored(), visit);
  std::vector<Piece> pieces;
  for_each_shared_key_run(ascending_runs(a), ascending_runs(b), [&](const Piece& piece) { pieces.push_back(piece); });
  visit_in_order_of_b(std::move(pieces), visit);
}

// True if one of the lists stores repetitions.
bool either_repeats(const IntervalList& a, const IntervalList& b) { return a.has_repeats() || b.has_repeats(); }

// Appends the indices of `list` at `positions`, which ascend, in one pass over both.
void append_at_positions(IntervalList& out, std::span<const Interval> list, std::span<const Interval> positions) {
  auto at = list.begin();
  int64_t begin = 0;  // the local position of *at
  for (const Interval& wanted : positions) {
    while (at != list.end() && begin + at->extent() <= wanted.begin) begin += (at++)->extent();
    int64_t position = begin;
    for (auto interval = at; interval != list.end() && position < wanted.end; ++interval) {
      const int64_t from = std::max(wanted.begin - position, int64_t{0});
      const int64_t to = std::min(wanted.end - position, interval->extent());
      append(out, interval->part(from, to));
      position += interval->extent();
    }
  }
}

// Returns the local positions of the pieces in list a.
IntervalList positions_in_a(const PieceList& pieces) {
  IntervalList out;
  std::vector<Interval> intervals;
  for (const auto& [block, count, shift] : pieces.blocks()) {
    intervals.clear();
    for (const Piece& piece : block) intervals.push_back({piece.a_position, piece.a_position + piece.length});
    out.append_repeated(intervals, shift.a, count);
  }
  return out;
}

// Summarizes the part of an ascending list within a range, without listing repetitions. Side a is the range, side b the
// list.
SharedRuns runs_within(const Interval& range, const IntervalList& list) {
  SharedRuns shared;
  int64_t position = 0;  // local position of the block
  list.for_each_block([&](const IntervalList::Block& block) {
    const auto& [intervals, count, period] = block;
    int64_t once = 0;
    for (const Interval& interval : intervals) once += interval.extent();
    int64_t within = 0;
    for (const Interval& interval : intervals) {
      const int64_t before = position + within;
      within += interval.extent();
      // The repetitions [first, end) overlap the range.
      int64_t first = interval.end <= range.begin ? 1 : 0;
      int64_t end = interval.begin < range.end ? 1 : 0;
      if (count > 1) {
        if (interval.end <= range.begin) first = (range.begin - interval.end) / period + 1;
        if (interval.begin < range.end) end = std::min((range.end - interval.begin - 1) / period + 1, count);
      }
      if (first >= end) continue;
      // Numbers of indices of these repetitions before and after the range.
      const int64_t clipped_at_begin = std::max<int64_t>(range.begin - interval.begin - first * period, 0);
      const int64_t clipped_at_end = std::max<int64_t>(interval.end + (end - 1) * period - range.end, 0);
      const int64_t a_position = interval.begin + first * period + clipped_at_begin - range.begin;
      if (shared.runs == 0 || a_position < shared.a_position) {
        shared.a_position = a_position;
        shared.b_position = before + first * once + clipped_at_begin;
      }
      shared.runs += end - first;
      shared.length += (end - first) * interval.extent() - clipped_at_begin - clipped_at_end;
    }
    position += once * count;
  });
  return shared;
}

}  // namespace

IntervalList at_positions(const IntervalList& list, const IntervalList& positions) {
  if (!either_repeats(list, positions)) {
    IntervalList out;
    append_at_positions(out, list.stored(), positions.stored());
    return out;
  }
  return positions_in_a(intersect(indices_by_position(list), positions_by_index(positions)));
}

IntervalList shared_indices(const IntervalList& a, const IntervalList& b) {
  if (either_repeats(a, b)) return at_positions(a, positions_in_a(intersect(a, b)));
  IntervalList both;
  const std::span<const Interval> in_a = a.stored(), in_b = b.stored();
  const auto ends_before = [](const Interval& interval, int64_t index) { return interval.end <= index; };
  // Skips the intervals of b that end before a begins.
  auto i = in_a.begin();
  auto j = a.empty() ? in_b.end() : std::lower_bound(in_b.begin(), in_b.end(), a.front().begin, ends_before);
  while (i != in_a.end() && j != in_b.end()) {
    append(both, {std::max(i->begin, j->begin), std::min(i->end, j->end)});
    i->end <= j->end ? void(++i) : void(++j);
  }
  return both;
}

namespace {

// Returns the map from local positions in list b to local positions in list a, for pieces of two ascending lists.
std::vector<PeriodicRuns> from_b_to_a(const PieceList& pieces) {
  std::vector<PeriodicRuns> sequence;
  for (const auto& [block, count, shift] : pieces.blocks()) {
    PeriodicRuns& periodic = sequence.emplace_back();
    for (const Piece& piece : block) {
      periodic.runs.push_back({piece.b_position, piece.length, piece.a_position});
      periodic.num_keys += piece.length;
    }
    periodic.count = count;
    periodic.key_period = shift.b;
    periodic.value_period = shift.a;
  }
  return sequence;
}

}  // namespace

PieceList intersect(const IntervalList& a, const IntervalList& b, const IntervalList& only) {
  // Keys are local positions in `only`. They ascend together with the local positions in b.
  if ((either_repeats(a, b) || only.has_repeats()) && is_ascending(a) && is_ascending(b)) {
    return intersect(from_b_to_a(intersect(a, only)), from_b_to_a(intersect(b, only)));
  }
  // Returns runs with local positions in `only` as keys and local positions in `list` as values.
  const auto runs_of = [&](const IntervalList& list) {
    std::vector<KeyRun> runs;
    for (const Piece& piece : intersect(list, only)) runs.push_back({piece.b_position, piece.length, piece.a_position});
    std::sort(runs.begin(), runs.end(), [](const KeyRun& left, const KeyRun& right) { return left.key < right.key; });
    return runs;
  };
  std::vector<Piece> both;
  for_each_shared_key_run(runs_of(a), runs_of(b), [&](const Piece& piece) { both.push_back(piece); });
  PieceList pieces;
  visit_in_order_of_b(std::move(both), [&](const Piece& piece) { pieces.append(piece); });
  return pieces;
}

PieceList intersect(const IntervalList& a, const IntervalList& b) {
  if (either_repeats(a, b) && is_ascending(a) && is_ascending(b))
    return intersect(positions_by_index(a), positions_by_index(b));
  PieceList pieces;
  for_each_shared_run(a, b, [&](const Piece& piece) { pieces.append(piece); });
  return pieces;
}

SharedRuns shared_runs(const IntervalList& a, const IntervalList& b) {
  if (a.size() == 1 && is_ascending(b)) return runs_within(a.front(), b);
  if (b.size() == 1 && is_ascending(a)) {
    SharedRuns shared = runs_within(b.front(), a);
    std::swap(shared.a_position, shared.b_position);
    return shared;
  }
  SharedRuns shared;
  const auto add = [&](const Piece& piece) {
    if (shared.runs++ == 0) {
      shared.a_position = piece.a_position;
      shared.b_position = piece.b_position;
    }
    shared.length += piece.length;
  };
  if (!either_repeats(a, b)) {
    for_each_shared_run(a, b, add);
    return shared;
  }
  const PieceList pieces = intersect(a, b);
  if (pieces.empty()) return {};
  return {length(pieces), static_cast<int64_t>(pieces.size()), pieces.front().a_position, pieces.front().b_position};
}

int64_t intersection_length(const IntervalList& a, const IntervalList& b) { return shared_runs(a, b).length; }

int64_t shared_elements(const Region& a, const Region& b) {
  int64_t total = 1;
  for (size_t t = 0; t < a.size() && total > 0; ++t) total *= intersection_length(a[t], b[t]);
  return total;
}

}  // namespace shardwright
