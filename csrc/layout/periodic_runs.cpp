#include "layout/periodic_runs.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace shardwright {
namespace {

// Fixed cost of the methods that do not list all runs, in visited runs. Without it, short repetitions would not be
// listed.
constexpr int64_t kSetUp = 4;

// Calls visit(run) for the runs of all repetitions with keys in [begin, end), clipped to these keys.
template <typename Visit>
void for_each_run(const PeriodicRuns& periodic, int64_t begin, int64_t end, const Visit& visit) {
  begin = std::max(begin, periodic.begin());
  end = std::min(end, periodic.end());
  if (begin >= end) return;
  const int64_t first = periodic.count == 1 ? 0 : (begin - periodic.begin()) / periodic.key_period;
  for (int64_t i = first; i < periodic.count && periodic.begin() + i * periodic.key_period < end; ++i) {
    const int64_t keys = i * periodic.key_period;
    auto run = std::partition_point(periodic.runs.begin(), periodic.runs.end(), [&](const KeyRun& key_run) {
      return key_run.key + key_run.length + keys <= begin;
    });
    for (; run != periodic.runs.end() && run->key + keys < end; ++run) {
      const int64_t from = std::max(run->key + keys, begin);
      const int64_t to = std::min(run->key + run->length + keys, end);
      visit(KeyRun{from, to - from, run->value + i * periodic.value_period + from - run->key - keys});
    }
  }
}

// Returns the runs of all repetitions with keys in [begin, end), clipped to these keys.
std::vector<KeyRun> listed(const PeriodicRuns& periodic, int64_t begin, int64_t end) {
  std::vector<KeyRun> runs;
  for_each_run(periodic, begin, end, [&](const KeyRun& run) { runs.push_back(run); });
  return runs;
}

// Appends the intersection of two repeating ranges a and b to `out`, for the keys [begin_, end_) that both span.
class PeriodicOverlap {
 public:
  PeriodicOverlap(const PeriodicRuns& a, const PeriodicRuns& b, PieceList& out)
      : a_(a), b_(b), begin_(std::max(a.begin(), b.begin())), end_(std::min(a.end(), b.end())), out_(out) {}

  // Estimates the number of runs that each method visits (periodic_runs.h), and takes the method with the fewest.
  void append_pieces() const {
    if (begin_ >= end_) return;
    const int64_t runs_of_a = runs_in_range(a_);
    const int64_t runs_of_b = runs_in_range(b_);
    const int64_t by_listing = runs_of_a + runs_of_b;
    const int64_t by_common_periods = runs_in_common_period();
    const int64_t by_runs_of_a = runs_visited(a_, runs_of_a, b_);
    const int64_t by_runs_of_b = runs_visited(b_, runs_of_b, a_);
    const int64_t least = std::min({by_listing, by_common_periods, by_runs_of_a, by_runs_of_b});
    if (least == by_listing) return list(begin_);
    if (least == by_common_periods) return take_common_periods();
    if (least == by_runs_of_a) {
      return for_each_run(a_, begin_, end_, [&](const KeyRun& run) { take_run<true>(run, b_); });
    }
    for_each_run(b_, begin_, end_, [&](const KeyRun& run) { take_run<false>(run, a_); });
  }

 private:
  static constexpr int64_t kInapplicable = INT64_MAX;  // the number of runs of a method that does not apply

  // Returns about the number of runs with keys in [begin_, end_).
  int64_t runs_in_range(const PeriodicRuns& periodic) const {
    const auto runs = static_cast<int64_t>(periodic.runs.size());
    if (periodic.count > 1) return ((end_ - begin_) / periodic.key_period + 1) * runs;
    const auto before = [&](int64_t key) {
      return std::partition_point(periodic.runs.begin(), periodic.runs.end(),
                                  [&](const KeyRun& run) { return run.key < key; });
    };
    return before(end_) - before(begin_) + 1;
  }

  // Returns the period in keys after which both ranges repeat, or 0 if there is none or it does not fit twice into
  // [begin_, end_).
  int64_t common_period() const {
    if (a_.count == 1 || b_.count == 1) return 0;
    const int64_t times = b_.key_period / std::gcd(a_.key_period, b_.key_period);
    return times > (end_ - begin_) / 2 / a_.key_period ? 0 : times * a_.key_period;
  }

  // Returns the number of runs that take_common_periods() visits: those of one common period, and of the rest.
  int64_t runs_in_common_period() const {
    const int64_t period = common_period();
    if (period == 0) return kInapplicable;
    const int64_t of_one = period / a_.key_period * static_cast<int64_t>(a_.runs.size()) +
                           period / b_.key_period * static_cast<int64_t>(b_.runs.size());
    return 2 * of_one + kSetUp;
  }

  // Returns the number of runs that take_run() visits if it is called for all `num_walked` runs of `walked`;
  // kInapplicable unless the mean run spans at least two repetitions of `periodic`.
  static int64_t runs_visited(const PeriodicRuns& walked, int64_t num_walked, const PeriodicRuns& periodic) {
    if (periodic.count == 1) return kInapplicable;
    const int64_t mean_length = walked.num_keys / static_cast<int64_t>(walked.runs.size());
    if (mean_length < 2 * periodic.key_period) return kInapplicable;
    return num_walked * (2 * static_cast<int64_t>(periodic.runs.size()) + kSetUp);
  }

  // Appends the intersection from the key `begin` on, by merging all runs.
  void list(int64_t begin) const {
    for_each_shared_key_run(listed(a_, begin, end_), listed(b_, begin, end_),
                            [&](const Piece& piece) { out_.append(piece); });
  }

  // Appends the intersection of the first common period with its repetitions, then the rest by merging.
  void take_common_periods() const {
    const int64_t period = common_period();
    const int64_t times = (end_ - begin_) / period;
    std::vector<Piece> pieces;
    for_each_shared_key_run(listed(a_, begin_, begin_ + period), listed(b_, begin_, begin_ + period),
                            [&](const Piece& piece) { pieces.push_back(piece); });
    const Piece::Shift shift{period / a_.key_period * a_.value_period, period / b_.key_period * b_.value_period};
    out_.append_repeated(pieces, shift, times);
    list(begin_ + times * period);
  }

  // Appends the intersection of a run of a (or of b, if not is_of_a) with the range `other` of the other side: the full
  // repetitions of `other` within the run, and the partial repetitions before and after them.
  template <bool is_of_a>
  void take_run(const KeyRun& run, const PeriodicRuns& other) const {
    const int64_t end = run.key + run.length;
    const auto piece_of = [&](const KeyRun& other_run) {
      const int64_t value = run.value + other_run.key - run.key;
      return is_of_a ? Piece{other_run.length, value, other_run.value}
                     : Piece{other_run.length, other_run.value, value};
    };
    const auto append_listed = [&](int64_t from, int64_t to) {
      for_each_run(other, from, to, [&](const KeyRun& other_run) { out_.append(piece_of(other_run)); });
    };
    const int64_t period = other.key_period;
    const int64_t first = (run.key - other.begin() + period - 1) / period;  // the first full repetition
    const int64_t times = std::min((end - other.begin()) / period, other.count) - first;
    if (times < PieceList::kLeastRepeats) return append_listed(run.key, end);
    const int64_t from = other.begin() + first * period;
    append_listed(run.key, from);
    std::vector<Piece> pieces;
    for_each_run(other, from, from + period, [&](const KeyRun& other_run) { pieces.push_back(piece_of(other_run)); });
    const Piece::Shift shift{is_of_a ? period : other.value_period, is_of_a ? other.value_period : period};
    out_.append_repeated(pieces, shift, times);
    append_listed(from + times * period, end);
  }

  const PeriodicRuns& a_;
  const PeriodicRuns& b_;
  int64_t begin_;
  int64_t end_;
  PieceList& out_;
};

// Returns the map of a list, with a repeating range for each block. Keys are local positions if `keys_are_positions`,
// else indices. make_run(interval, position) returns the run of an interval whose local positions begin at `position`.
template <typename MakeRun>
std::vector<PeriodicRuns> periodic_runs_of(const IntervalList& list, bool keys_are_positions, const MakeRun& make_run) {
  std::vector<PeriodicRuns> sequence;
  int64_t position = 0;
  for (const auto& [intervals, count, shift] : list.blocks()) {
    PeriodicRuns& periodic = sequence.emplace_back();
    periodic.runs.reserve(intervals.size());
    int64_t within = 0;
    for (const Interval& interval : intervals) {
      periodic.runs.push_back(make_run(interval, position + within));
      within += interval.extent();
    }
    periodic.num_keys = within;
    periodic.count = count;
    periodic.key_period = keys_are_positions ? within : shift;
    periodic.value_period = keys_are_positions ? shift : within;
    position += count * within;
  }
  return sequence;
}

}  // namespace

std::vector<PeriodicRuns> positions_by_index(const IntervalList& list) {
  return periodic_runs_of(list, false, [](const Interval& interval, int64_t position) {
    return KeyRun{interval.begin, interval.extent(), position};
  });
}

std::vector<PeriodicRuns> indices_by_position(const IntervalList& list) {
  return periodic_runs_of(list, true, [](const Interval& interval, int64_t position) {
    return KeyRun{position, interval.extent(), interval.begin};
  });
}

// Merges the two sequences of ranges, and intersects each two ranges that overlap.
PieceList intersect(const std::vector<PeriodicRuns>& a, const std::vector<PeriodicRuns>& b) {
  PieceList pieces;
  for (auto i = a.begin(), j = b.begin(); i != a.end() && j != b.end();) {
    PeriodicOverlap(*i, *j, pieces).append_pieces();
    i->end() <= j->end() ? void(++i) : void(++j);
  }
  return pieces;
}

}  // namespace shardwright
