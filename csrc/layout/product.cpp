#include "layout/product.h"

#include <algorithm>
#include <vector>

namespace shardwright {
namespace {

// Writes products of lists of rows with one list of columns. Stores consecutive rows as repetitions of one row or one
// by one, whichever takes fewer intervals.
class ProductWriter {
 public:
  ProductWriter(const IntervalList& columns, int64_t num_columns, int64_t max_stored)
      : columns_(columns),
        num_columns_(num_columns),
        max_stored_(max_stored),
        has_all_columns_(columns.size() == 1 && columns.front() == Interval{0, num_columns}),
        num_stored_(static_cast<int64_t>(columns.stored().size())),
        num_listed_(static_cast<int64_t>(columns.size())),
        ascends_(is_ascending(columns)) {}

  // Appends the elements of a range of rows. Returns false if `out` then stores more than `max_stored_` intervals.
  bool append_rows(IntervalList& out, const Interval& rows) const {
    if (has_all_columns_) {
      append(out, {rows.begin * num_columns_, rows.end * num_columns_});
      return true;
    }
    // Only one level of repetitions is stored. If rows repeat, a row lists all intervals of its columns.
    const bool is_shorter_by_rows = rows.extent() > 1 && num_listed_ / rows.extent() <= num_stored_;
    if (ascends_ && is_shorter_by_rows && num_listed_ <= max_stored_) {
      const IntervalList first = shifted(columns_, rows.begin * num_columns_);
      out.append_repeated(std::vector<Interval>(first.begin(), first.end()), num_columns_, rows.extent());
      return fits(out);
    }
    return append_again(out, columns_, rows.extent(), num_columns_, rows.begin * num_columns_);
  }

  // Appends the elements of a list of rows. Repeating rows are stored once if that takes fewer intervals. Returns false
  // as append_rows() does.
  bool append_all(IntervalList& out, const IntervalList& rows) const {
    for (const auto& [intervals, count, shift] : rows.blocks()) {
      IntervalList once;
      for (const Interval& interval : intervals) {
        if (!append_rows(once, interval)) return false;
      }
      const auto listed = static_cast<int64_t>(once.size());
      const bool is_shorter_once = count > 1 && listed / count <= static_cast<int64_t>(once.stored().size());
      if (is_shorter_once && listed <= max_stored_ && is_ascending(once)) {
        out.append_repeated(std::vector<Interval>(once.begin(), once.end()), shift * num_columns_, count);
      } else if (!append_again(out, once, count, shift * num_columns_, 0)) {
        return false;
      }
    }
    return fits(out);
  }

 private:
  // True if the list stores at most `max_stored_` intervals.
  bool fits(const IntervalList& list) const { return static_cast<int64_t>(list.stored().size()) <= max_stored_; }

  // Appends the list `times` times: first shifted by `first`, then each time by `period` more. Returns false as
  // append_rows() does.
  bool append_again(IntervalList& out, const IntervalList& list, int64_t times, int64_t period, int64_t first) const {
    for (int64_t i = 0; i < times; ++i) {
      const IntervalList moved = shifted(list, first + i * period);
      for (const auto& block : moved.blocks()) out.append(block);
      if (!fits(out)) return false;
    }
    return true;
  }

  const IntervalList& columns_;
  int64_t num_columns_;   // of the matrix
  int64_t max_stored_;    // maximum number of stored intervals
  bool has_all_columns_;  // columns_ has all columns of the matrix
  int64_t num_stored_;    // number of stored intervals of columns_
  int64_t num_listed_;    // number of all intervals of columns_, repetitions included
  bool ascends_;          // columns_ ascends
};

}  // namespace

std::optional<IntervalList> product_of(const IntervalList& rows, const IntervalList& columns, int64_t num_columns,
                                       int64_t max_stored) {
  IntervalList out;
  if (columns.empty()) return out;
  if (!ProductWriter(columns, num_columns, max_stored).append_all(out, rows)) return std::nullopt;
  return out;
}

}  // namespace shardwright
