#include "layout/region.h"

#include <algorithm>

namespace shardwright {
namespace {

int64_t size(const Interval& interval) { return interval.end - interval.begin; }

template <typename Visit>
void for_each_shared_run(const IntervalList& a, const IntervalList& b, const Visit& visit) {
  size_t i = 0;
  size_t j = 0;
  int64_t a_position = 0;
  int64_t b_position = 0;
  while (i < a.size() && j < b.size()) {
    const int64_t begin = std::max(a[i].begin, b[j].begin);
    const int64_t end = std::min(a[i].end, b[j].end);
    if (begin < end) visit(Piece{end - begin, a_position + begin - a[i].begin, b_position + begin - b[j].begin});
    if (a[i].end <= b[j].end) {
      a_position += a[i].end - a[i].begin;
      ++i;
    } else {
      b_position += b[j].end - b[j].begin;
      ++j;
    }
  }
}

}  // namespace

int64_t length(const IntervalList& list) {
  int64_t total = 0;
  for (const Interval& interval : list) total += interval.end - interval.begin;
  return total;
}

int64_t num_elements(const Region& region) {
  int64_t total = 1;
  for (const IntervalList& list : region) total *= length(list);
  return total;
}

std::vector<int64_t> shape_of(const Region& region) {
  std::vector<int64_t> shape;
  shape.reserve(region.size());
  for (const IntervalList& list : region) shape.push_back(length(list));
  return shape;
}

IntervalList subrange(const IntervalList& list, int64_t begin, int64_t end) {
  IntervalList out;
  Subranges(list).append_to(out, begin, end);
  return out;
}

void Subranges::append_to(IntervalList& out, int64_t begin, int64_t end) {
  if (begin >= end) return;
  while (at_ != end_ && position_ + size(*at_) <= begin) position_ += size(*at_++);
  int64_t position = position_;
  for (auto interval = at_; interval != end_ && position < end; ++interval) {
    const int64_t from = std::max(begin - position, int64_t{0});
    const int64_t to = std::min(end - position, size(*interval));
    append(out, {interval->begin + from, interval->begin + to});
    position += size(*interval);
  }
}

IntervalList moved_to_zero(IntervalList list) {
  const int64_t first = list.empty() ? 0 : list.front().begin;
  for (Interval& interval : list) {
    interval.begin -= first;
    interval.end -= first;
  }
  return list;
}

std::vector<Piece> intersect(const IntervalList& a, const IntervalList& b) {
  std::vector<Piece> pieces;
  for_each_shared_run(a, b, [&](const Piece& piece) { pieces.push_back(piece); });
  return pieces;
}

SharedRuns shared_runs(const IntervalList& a, const IntervalList& b) {
  SharedRuns shared;
  for_each_shared_run(a, b, [&](const Piece& piece) {
    if (shared.runs++ == 0) {
      shared.a_position = piece.a_position;
      shared.b_position = piece.b_position;
    }
    shared.length += piece.length;
  });
  return shared;
}

int64_t intersection_length(const IntervalList& a, const IntervalList& b) {
  int64_t total = 0;
  for_each_shared_run(a, b, [&](const Piece& piece) { total += piece.length; });
  return total;
}

int64_t shared_elements(const Region& a, const Region& b) {
  int64_t total = 1;
  for (size_t t = 0; t < a.size() && total > 0; ++t) total *= intersection_length(a[t], b[t]);
  return total;
}

}  // namespace shardwright
