#include "layout/region.h"

#include <algorithm>
#include <utility>

namespace shardwright {
namespace {

int64_t size(const Interval& interval) { return interval.end - interval.begin; }

// Hands out pieces one by one, those that follow each other on both sides as one.
template <typename Visit>
class Joined {
 public:
  explicit Joined(const Visit& visit) : visit_(visit) {}
  ~Joined() {
    if (last_.length > 0) visit_(last_);
  }
  Joined(const Joined&) = delete;
  Joined& operator=(const Joined&) = delete;

  void add(const Piece& piece) {
    const bool follows =
        last_.a_position + last_.length == piece.a_position && last_.b_position + last_.length == piece.b_position;
    if (last_.length > 0 && follows) {
      last_.length += piece.length;
      return;
    }
    if (last_.length > 0) visit_(last_);
    last_ = piece;
  }

 private:
  const Visit& visit_;
  Piece last_;
};

template <typename Visit>
void for_each_shared_run_ascending(const IntervalList& a, const IntervalList& b, const Visit& visit) {
  Joined<Visit> joined(visit);
  size_t i = 0;
  size_t j = 0;
  int64_t a_position = 0;
  int64_t b_position = 0;
  while (i < a.size() && j < b.size()) {
    const int64_t begin = std::max(a[i].begin, b[j].begin);
    const int64_t end = std::min(a[i].end, b[j].end);
    if (begin < end) joined.add({end - begin, a_position + begin - a[i].begin, b_position + begin - b[j].begin});
    if (a[i].end <= b[j].end) {
      a_position += a[i].end - a[i].begin;
      ++i;
    } else {
      b_position += b[j].end - b[j].begin;
      ++j;
    }
  }
}

// An interval of a list and its local position.
struct Placed {
  Interval interval;
  int64_t position = 0;
};

std::vector<Placed> placed(const IntervalList& list) {
  std::vector<Placed> all;
  all.reserve(list.size());
  int64_t position = 0;
  for (const Interval& interval : list) {
    all.push_back({interval, position});
    position += size(interval);
  }
  std::sort(all.begin(), all.end(),
            [](const Placed& a, const Placed& b) { return a.interval.begin < b.interval.begin; });
  return all;
}

template <typename Visit>
void visit_in_order_of_b(std::vector<Piece> pieces, const Visit& visit) {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.b_position < b.b_position; });
  Joined<Visit> joined(visit);
  for (const Piece& piece : pieces) joined.add(piece);
}

template <typename Visit>
void for_each_shared_run(const IntervalList& a, const IntervalList& b, const Visit& visit) {
  if (is_ascending(a) && is_ascending(b)) return for_each_shared_run_ascending(a, b, visit);
  const std::vector<Placed> of_a = placed(a);
  const std::vector<Placed> of_b = placed(b);
  std::vector<Piece> pieces;
  for (auto i = of_a.begin(), j = of_b.begin(); i != of_a.end() && j != of_b.end();) {
    const int64_t begin = std::max(i->interval.begin, j->interval.begin);
    const int64_t end = std::min(i->interval.end, j->interval.end);
    if (begin < end) {
      pieces.push_back({end - begin, i->position + begin - i->interval.begin, j->position + begin - j->interval.begin});
    }
    i->interval.end <= j->interval.end ? void(++i) : void(++j);
  }
  visit_in_order_of_b(std::move(pieces), visit);
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

bool is_ascending(const IntervalList& list) {
  for (size_t i = 1; i < list.size(); ++i) {
    if (list[i].begin < list[i - 1].end) return false;
  }
  return true;
}

Interval span_of(const IntervalList& list) {
  if (list.empty()) return {};
  Interval span = list.front();
  for (const Interval& one : list) span = {std::min(span.begin, one.begin), std::max(span.end, one.end)};
  return span;
}

IntervalList sorted_by_place(IntervalList list) {
  std::sort(list.begin(), list.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  return list;
}

std::vector<Piece> intersect(const IntervalList& a, const IntervalList& b, const IntervalList& only) {
  const auto by_place = [](const Piece& x, const Piece& y) { return x.b_position < y.b_position; };
  std::vector<Piece> in_a = intersect(a, only);  // positions in `only` are those of b there
  std::vector<Piece> in_b = intersect(b, only);
  std::sort(in_a.begin(), in_a.end(), by_place);
  std::sort(in_b.begin(), in_b.end(), by_place);
  std::vector<Piece> both;
  for (auto i = in_a.begin(), j = in_b.begin(); i != in_a.end() && j != in_b.end();) {
    const int64_t begin = std::max(i->b_position, j->b_position);
    const int64_t end = std::min(i->b_position + i->length, j->b_position + j->length);
    if (begin < end) {
      both.push_back({end - begin, i->a_position + begin - i->b_position, j->a_position + begin - j->b_position});
    }
    i->b_position + i->length <= j->b_position + j->length ? void(++i) : void(++j);
  }
  std::vector<Piece> pieces;
  visit_in_order_of_b(std::move(both), [&](const Piece& piece) { pieces.push_back(piece); });
  return pieces;
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

IntervalList in_common(const IntervalList& a, const IntervalList& b) {
  IntervalList both;
  const auto ends_before = [](const Interval& one, int64_t index) { return one.end <= index; };
  auto i = a.begin();
  auto j = a.empty() ? b.end() : std::lower_bound(b.begin(), b.end(), a.front().begin, ends_before);
  while (i != a.end() && j != b.end()) {
    append(both, {std::max(i->begin, j->begin), std::min(i->end, j->end)});
    i->end <= j->end ? void(++i) : void(++j);
  }
  return both;
}

int64_t shared_elements(const Region& a, const Region& b) {
  int64_t total = 1;
  for (size_t t = 0; t < a.size() && total > 0; ++t) total *= intersection_length(a[t], b[t]);
  return total;
}

}  // namespace shardwright
