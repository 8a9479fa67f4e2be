#include "layout/cut_rule.h"

#include <algorithm>

namespace shardwright {
namespace {

int64_t ceil_divide(int64_t n, int64_t k) { return (n + k - 1) / k; }

}  // namespace

// Calls visit(begin, end) for the local positions that a coordinate gets, ascending; ranges may be empty or touch.
template <typename Visit>
void CutRule::for_each_range(int64_t n, int64_t k, int64_t coordinate, const Visit& visit) const {
  const int64_t piece = ceil_divide(n, split_factor_);
  for (int64_t begin = 0; begin < n; begin += piece) {
    const int64_t end = std::min(begin + piece, n);
    const int64_t chunk = ceil_divide(end - begin, k);
    visit(std::min(begin + coordinate * chunk, end), std::min(begin + (coordinate + 1) * chunk, end));
  }
}

IntervalList CutRule::part(const IntervalList& list, int64_t k, int64_t coordinate) const {
  Subranges subranges(list);
  IntervalList out;
  for_each_range(shardwright::length(list), k, coordinate,
                 [&](int64_t begin, int64_t end) { subranges.append_to(out, begin, end); });
  return out;
}

int64_t CutRule::length(int64_t n, int64_t k, int64_t coordinate) const {
  if (n == 0) return 0;
  const auto of_piece = [&](int64_t piece) {
    const int64_t chunk = ceil_divide(piece, k);
    return std::min((coordinate + 1) * chunk, piece) - std::min(coordinate * chunk, piece);
  };
  const int64_t piece = ceil_divide(n, split_factor_);
  return n / piece * of_piece(piece) + of_piece(n % piece);
}

int64_t CutRule::runs(int64_t, int64_t) const { return split_factor_; }

// Chunks are full ones first, then a short one, then empty ones, of every piece alike.
int64_t CutRule::largest(int64_t, int64_t) const { return 0; }

Interval CutRule::coordinates_of(Interval range, int64_t n, int64_t k) const {
  if (!makes_runs()) return {0, k};
  const int64_t chunk = ceil_divide(n, k);
  return {range.begin / chunk, (range.end - 1) / chunk + 1};
}

std::vector<int64_t> CutRule::starts_of_like_parts(int64_t n, int64_t k) const {
  std::vector<int64_t> starts{0};
  if (n == 0) return starts;
  if (is_chunks()) {
    const int64_t chunk = ceil_divide(n, k);
    const int64_t full = n / chunk;
    if (full < k) starts.push_back(full);
    if (full * chunk < n && full + 1 < k) starts.push_back(full + 1);
    return starts;
  }
  IntervalList last;
  for (int64_t c = 0; c < k; ++c) {
    IntervalList here = moved_to_zero(part({{0, n}}, k, c));
    if (c > 0 && here != last) starts.push_back(c);
    last = std::move(here);
  }
  return starts;
}

std::optional<int64_t> CutRule::equal_split_factor(int64_t n, int64_t k) const {
  if (!cuts_evenly(n, k)) return std::nullopt;
  return split_factor_;
}

std::optional<CutRule> CutRule::with_gathered(const CutRule& earlier, int64_t k) const {
  if (split_factor_ % earlier.split_factor_ != 0) return std::nullopt;
  return CutRule(split_factor_ * k);
}

std::optional<CutRule> CutRule::behind(const CutRule& later, int64_t k) const {
  if (split_factor_ % (later.split_factor_ * k) != 0) return std::nullopt;
  return CutRule(split_factor_ / k);
}

}  // namespace shardwright
