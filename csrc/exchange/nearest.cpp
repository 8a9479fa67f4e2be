#include "exchange/nearest.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

namespace shardwright {
namespace {

// An assignment of the rows of a dim to ranks that leaves the most elements on their rank. A rank *keeps* the rows that
// it holds and that are assigned to it, at most max_rows_. The value of a kept row is the number of the rank's elements
// in it, which is equal for all rows of a rank. Rows that the same ranks hold are of one *kind*.
//
// A rank has max_rows_ places; the sets of places that different rows can fill form a matroid, so a greedy choice is
// optimal: in descending order of value, each rank keeps as many rows as possible, by augmenting paths, while earlier
// ranks keep as many as before.
class RowAssignment {
 public:
  RowAssignment(int64_t rows, const std::vector<IntervalList>& held, std::vector<int64_t> row_elements)
      : row_elements_(std::move(row_elements)), max_rows_((rows + std::ssize(held) - 1) / std::ssize(held)) {
    find_runs(rows, held);
    kept_.resize(held.size());
    std::vector<size_t> order(held.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return row_elements_[a] > row_elements_[b]; });
    for (const size_t rank : order) keep_rows(rank);
  }

  // Returns the number of elements that stay on their rank.
  int64_t kept_elements() const {
    int64_t elements = 0;
    for (size_t r = 0; r < kept_.size(); ++r) elements += row_elements_[r] * num_kept(r);
    return elements;
  }

  // Returns the rows of each rank, ascending. Divides each run among the ranks that keep rows of its kind; the
  // remaining rows go to the first ranks with fewer than max_rows_ rows.
  std::vector<std::vector<Interval>> lists() const {
    struct Taker {
      size_t rank = 0;
      int64_t rows = 0;  // number of rows that the rank may still take
    };
    std::vector<std::vector<Interval>> lists(kept_.size());
    std::vector<std::vector<Taker>> keepers(unassigned_.size());  // by kind
    std::vector<Taker> ranks_with_room;
    for (size_t r = 0; r < kept_.size(); ++r) {
      for (const auto& [kind, rows] : kept_[r]) keepers[kind].push_back({r, rows});
      ranks_with_room.push_back({r, max_rows_ - num_kept(r)});
    }
    for (const Run& run : runs_) {
      int64_t at = run.rows.begin;
      for (std::vector<Taker>* takers : {&keepers[run.kind], &ranks_with_room}) {
        for (Taker& taker : *takers) {
          const int64_t count = std::min(run.rows.end - at, taker.rows);
          if (count == 0) continue;
          std::vector<Interval>& own = lists[taker.rank];
          const bool extends_last = !own.empty() && own.back().end == at;
          extends_last ? own.back().lengthen(count) : own.push_back({at, at + count});
          taker.rows -= count;
          at += count;
        }
      }
    }
    return lists;
  }

 private:
  // Consecutive rows of one kind.
  struct Run {
    Interval rows;
    size_t kind = 0;
  };
  // A step of an augmenting path: the rank takes rows of the kind from the next step's rank. The last step's rank takes
  // rows that no rank keeps.
  struct PathStep {
    size_t rank = 0;
    size_t kind = 0;
  };

  // Returns the number of rows that a rank keeps.
  int64_t num_kept(size_t rank) const {
    int64_t rows = 0;
    for (const auto& [kind, count] : kept_[rank]) rows += count;
    return rows;
  }
  bool keeps(size_t rank, size_t kind) const {
    const auto found = kept_[rank].find(kind);
    return found != kept_[rank].end() && found->second > 0;
  }

  // Fills runs_, unassigned_ and kinds_of_. `held` has the rows that each rank holds.
  void find_runs(int64_t rows, const std::vector<IntervalList>& held) {
    std::vector<int64_t> ends{0, rows};
    for (const IntervalList& list : held) {
      for (const Interval& interval : list) ends.insert(ends.end(), {interval.begin, interval.end});
    }
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
    std::vector<std::vector<size_t>> ranks_of_run(ends.size());  // by run
    for (size_t r = 0; r < held.size(); ++r) {
      for (const Interval& interval : held[r]) {
        auto run = std::lower_bound(ends.begin(), ends.end(), interval.begin) - ends.begin();
        for (; ends[run] < interval.end; ++run) ranks_of_run[run].push_back(r);
      }
    }
    std::map<std::vector<size_t>, size_t> kinds;
    kinds_of_.resize(held.size());
    for (size_t run = 0; run + 1 < ends.size(); ++run) {
      const auto [found, is_new] = kinds.try_emplace(ranks_of_run[run], kinds.size());
      const size_t kind = found->second;
      if (is_new) {
        unassigned_.push_back(0);
        for (const size_t rank : ranks_of_run[run]) kinds_of_[rank].push_back(kind);
      }
      unassigned_[kind] += ends[run + 1] - ends[run];
      runs_.push_back({{ends[run], ends[run + 1]}, kind});
    }
  }

  // Lets a rank keep as many rows as possible, along augmenting paths. Every other rank keeps as many rows as before.
  void keep_rows(size_t rank) {
    for (int64_t room = row_elements_[rank] > 0 ? max_rows_ : 0; room > 0;) {
      const std::vector<PathStep> path = path_from(rank);
      if (path.empty()) return;
      int64_t rows = std::min(room, unassigned_[path.back().kind]);
      for (size_t i = 1; i < path.size(); ++i) rows = std::min(rows, kept_[path[i].rank][path[i - 1].kind]);
      for (size_t i = 0; i < path.size(); ++i) {
        kept_[path[i].rank][path[i].kind] += rows;
        if (i > 0) kept_[path[i].rank][path[i - 1].kind] -= rows;
      }
      unassigned_[path.back().kind] -= rows;
      room -= rows;
    }
  }

  // Returns the shortest augmenting path from a rank to a kind with unassigned rows; an empty path if there is none.
  std::vector<PathStep> path_from(size_t rank) const {
    std::vector<std::optional<PathStep>> previous(kept_.size());  // by rank: the step before the rank's own
    std::deque<size_t> queue{rank};
    for (; !queue.empty(); queue.pop_front()) {
      const size_t at = queue.front();
      for (const size_t kind : kinds_of_[at]) {
        if (unassigned_[kind] > 0) {
          std::vector<PathStep> path{{at, kind}};
          while (path.back().rank != rank) path.push_back(*previous[path.back().rank]);
          std::reverse(path.begin(), path.end());
          return path;
        }
        for (size_t other = 0; other < kept_.size(); ++other) {
          if (other == rank || previous[other] || !keeps(other, kind)) continue;
          previous[other] = PathStep{at, kind};
          queue.push_back(other);
        }
      }
    }
    return {};
  }

  std::vector<int64_t> row_elements_;            // by rank: number of elements of each row that it holds
  int64_t max_rows_;                             // maximum number of rows of a rank
  std::vector<Run> runs_;                        // all rows, ascending
  std::vector<int64_t> unassigned_;              // by kind: rows that no rank keeps yet
  std::vector<std::vector<size_t>> kinds_of_;    // by rank: the kinds that it holds
  std::vector<std::map<size_t, int64_t>> kept_;  // by rank: kept rows of each kind
};

}  // namespace

NearestCut nearest_cut(const Layout& src, const std::vector<Rank>& ranks) {
  std::vector<std::optional<Region>> regions;
  for (const Rank rank : ranks) {
    const std::optional<Position> position = src.mesh().position_of(rank);
    regions.push_back(position ? std::optional<Region>(src.region(*position)) : std::nullopt);
  }
  NearestCut best;
  int64_t most_kept = -1;
  for (int t = 0; t < src.ndim(); ++t) {
    std::vector<IntervalList> held(ranks.size());
    std::vector<int64_t> row_elements(ranks.size(), 0);
    for (size_t r = 0; r < ranks.size(); ++r) {
      if (!regions[r]) continue;
      Region others = *regions[r];
      held[r] = std::move(others[t]);
      others.erase(others.begin() + t);
      row_elements[r] = num_elements(others);
    }
    const RowAssignment assignment(src.shape()[t], held, std::move(row_elements));
    if (assignment.kept_elements() <= most_kept) continue;
    most_kept = assignment.kept_elements();
    best = {t, assignment.lists()};
  }
  return best;
}

}  // namespace shardwright
