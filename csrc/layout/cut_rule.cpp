#include "layout/cut_rule.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "support/ceil_divide.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 57;  // no tensor has more (Layout::kMaxBytesOnAllRanks)

// Throws UserError if there are no sizes, or if one is negative or their sum exceeds kMaxElements. `name` is the rule.
void check_sizes(const char* name, const std::vector<int64_t>& sizes) {
  check_user(!sizes.empty(), "placements: sizes of ", name, " must be a list of at least one integer, got none");
  int64_t left = kMaxElements;
  for (const int64_t size : sizes) {
    check_user(size >= 0, "placements: sizes of ", name, " must be at least 0, got ", size);
    check_user(size <= left, "placements: sum of the sizes of ", name, " must be at most 2^57, got more");
    left -= size;
  }
}

// Throws UserError if a block or unit is out of range. `name` is the number and its rule, such as "block of Blocks".
void check_block(const char* name, int64_t block) {
  check_user(block >= 1 && block <= CutRule::kMaxBlock, "placements: ", name, " must be in [1, 2^31], got ", block);
}

// Returns chunk `coordinate` of n elements. Chunks have `chunk` elements; the last ones may be short or empty.
Interval chunk_at(int64_t n, int64_t chunk, int64_t coordinate) {
  return {std::min(coordinate * chunk, n), std::min((coordinate + 1) * chunk, n)};
}

}  // namespace

// Sets `ends_` to the prefix sums of the sizes, or to null if there are no sizes.
CutRule::CutRule(Kind kind, int64_t parameter, const std::vector<int64_t>& sizes) : kind_(kind), parameter_(parameter) {
  if (sizes.empty()) return;
  std::vector<int64_t> ends(sizes.size());
  std::partial_sum(sizes.begin(), sizes.end(), ends.begin());
  ends_ = std::make_shared<const std::vector<int64_t>>(std::move(ends));
}

CutRule CutRule::ragged(const std::vector<int64_t>& sizes) {
  check_sizes("Ragged", sizes);
  return CutRule(Kind::kRagged, 0, sizes);
}

CutRule CutRule::blocks(int64_t block) {
  check_block("block of Blocks", block);
  return CutRule(Kind::kBlocks, block);
}

CutRule CutRule::cyclic(int64_t block) {
  check_block("block of Cyclic", block);
  return CutRule(Kind::kCyclic, block);
}

CutRule CutRule::owned(int64_t coordinate) {
  check_argument(coordinate >= 0, "placements: coordinate of Owned", "at least 0", coordinate);
  return CutRule(Kind::kOwned, coordinate);
}

CutRule CutRule::packed(const std::vector<int64_t>& sizes, int64_t unit) {
  check_sizes("Packed", sizes);
  check_block("unit of Packed", unit);
  check_argument(static_cast<int64_t>(sizes.size()) <= kMaxRuns, "placements: number of sizes of Packed",
                 "at most 2^20", sizes.size());
  return CutRule(Kind::kPacked, unit, sizes);
}

// Checks each list for repeated elements, then all lists together for missing elements.
CutRule CutRule::pieces(const std::vector<std::vector<Interval>>& lists) {
  check_argument(!lists.empty(), "placements: lists of Pieces", "one per coordinate", "none");
  auto pieces = std::make_shared<Pieces>();
  std::vector<Interval> all;
  for (size_t c = 0; c < lists.size(); ++c) {
    IntervalList& list = pieces->lists.emplace_back();
    for (const Interval& interval : lists[c]) {
      check_user(interval.begin >= 0 && interval.begin <= interval.end && interval.end <= kMaxElements,
                 "placements: intervals of Pieces must have 0 <= begin <= end <= 2^57, got [", interval.begin, ", ",
                 interval.end, ") for coordinate ", c);
      append(list, interval);
    }
    const auto overlap = [](const Interval& a, const Interval& b) { return a.end > b.begin; };
    const std::vector<Interval> sorted = sorted_by_begin(list);
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end(), overlap);
    check_user(twice == sorted.end(), "placements: lists of Pieces must contain an element at most once, got element ",
               twice == sorted.end() ? 0 : (twice + 1)->begin, " twice for coordinate ", c);
    pieces->is_partition = pieces->is_partition && is_ascending(list);
    all.insert(all.end(), sorted.begin(), sorted.end());
  }
  check_argument(static_cast<int64_t>(all.size()) <= kMaxRuns, "placements: number of intervals of Pieces",
                 "at most 2^20", all.size());
  for (const Interval& interval : sorted_by_begin(all)) {
    check_user(interval.begin <= pieces->n, "placements: lists of Pieces must contain all elements, got none for [",
               pieces->n, ", ", interval.begin, ")");
    pieces->is_partition = pieces->is_partition && interval.begin == pieces->n;
    pieces->n = std::max(pieces->n, interval.end);
  }
  CutRule rule(Kind::kPieces, 0);
  rule.pieces_ = std::move(pieces);
  return rule;
}

std::vector<int64_t> CutRule::sizes() const {
  if (pieces_) {
    std::vector<int64_t> sizes;
    for (const IntervalList& list : pieces_->lists) sizes.push_back(shardwright::length(list));
    return sizes;
  }
  std::vector<int64_t> sizes(*ends_);
  std::adjacent_difference(sizes.begin(), sizes.end(), sizes.begin());
  return sizes;
}

std::string CutRule::why_not_over(int64_t k) const {
  if (kind_ == Kind::kRagged && static_cast<int64_t>(ends_->size()) != k) {
    return concat("number of sizes must be ", k, ", one per coordinate, got ", ends_->size());
  }
  if (pieces_ && static_cast<int64_t>(pieces_->lists.size()) != k) {
    return concat("number of lists must be ", k, ", one per coordinate, got ", pieces_->lists.size());
  }
  if (kind_ == Kind::kOwned && parameter_ >= k) {
    return concat("coordinate must be ", InRange{0, k - 1}, ", got ", parameter_);
  }
  return "";
}

std::string CutRule::why_not(int64_t n, int64_t k) const {
  if (ends_ && ends_->back() != n) {
    return concat("sum of the sizes must be ", n, ", the number of elements to cut, got ", ends_->back());
  }
  if (pieces_ && pieces_->n < n) {
    return concat("lists must contain all ", n, " elements to cut, got none for [", pieces_->n, ", ", n, ")");
  }
  if (pieces_ && pieces_->n > n) {
    return concat("largest end must be ", n, ", the number of elements to cut, got ", pieces_->n);
  }
  if (kind_ == Kind::kCyclic && k > 1 && runs(n, k) > kMaxRuns) {
    return concat("number of blocks per coordinate must be at most 2^20, got ", runs(n, k), " for ", n, " elements");
  }
  return why_not_over(k);
}

int64_t CutRule::chunk_length(int64_t n, int64_t k) const {
  const int64_t block = kind_ == Kind::kBlocks || kind_ == Kind::kPacked ? parameter_ : 1;
  return ceil_divide(ceil_divide(n, block), k) * block;
}

// Returns the positions that a coordinate gets, in order, each increased by `first`.
IntervalList CutRule::positions(int64_t n, int64_t k, int64_t coordinate, int64_t first) const {
  IntervalList list;
  const auto chunk_of = [&](int64_t begin, int64_t length, int64_t chunk) {
    return chunk_at(length, chunk, coordinate).shifted(first + begin);
  };
  switch (kind_) {
    case Kind::kStrided: {
      if (n == 0) return list;
      const int64_t piece = ceil_divide(n, parameter_);
      const int64_t full_pieces = n / piece;
      append_repeated(list, chunk_of(0, piece, ceil_divide(piece, k)), piece, full_pieces);
      append(list, chunk_of(full_pieces * piece, n % piece, ceil_divide(n % piece, k)));
      return list;
    }
    case Kind::kRagged:
      append(list, component(static_cast<size_t>(coordinate)).shifted(first));
      return list;
    case Kind::kBlocks:
      append(list, chunk_of(0, n, chunk_length(n, k)));
      return list;
    case Kind::kCyclic: {
      const int64_t period = k * parameter_;
      const Interval block{coordinate * parameter_, (coordinate + 1) * parameter_};
      const int64_t full_blocks = block.end <= n ? (n - block.end) / period + 1 : 0;
      append_repeated(list, block.shifted(first), period, full_blocks);
      append(list, Interval{block.begin + full_blocks * period, n}.shifted(first));
      return list;
    }
    case Kind::kOwned:
      if (coordinate == parameter_) append(list, Interval{0, n}.shifted(first));
      return list;
    case Kind::kPacked:
      for (size_t i = 0; i < ends_->size(); ++i) {
        const Interval interval = component(i);
        append(list, chunk_of(interval.begin, interval.extent(), chunk_length(interval.extent(), k)));
      }
      return list;
    case Kind::kPieces:
      return shifted(pieces_->lists[static_cast<size_t>(coordinate)], first);
  }
  throw InvariantError("the kind of a cut rule is unknown");
}

IntervalList CutRule::part(const IntervalList& list, int64_t k, int64_t coordinate) const {
  if (list.empty()) return {};
  if (!list.has_repeats() && list.stored().size() == 1) {
    const auto [begin, end] = list.front();
    if (!is_chunks()) return positions(end - begin, k, coordinate, begin);
    // Fast path: most rules are chunks, and planning computes very many parts.
    const Interval range = chunk_at(end - begin, ceil_divide(end - begin, k), coordinate);
    if (range.begin == range.end) return {};
    return {{begin + range.begin, begin + range.end}};
  }
  const IntervalList positions = this->positions(shardwright::length(list), k, coordinate, 0);
  if (is_partition()) return at_positions(list, positions);
  IntervalList out;
  for (const Interval& interval : positions) {
    const IntervalList range = subrange(list, interval.begin, interval.end);
    for (const auto& block : range.blocks()) out.append(block);
  }
  return out;
}

int64_t CutRule::length(int64_t n, int64_t k, int64_t coordinate) const {
  if (n == 0) return 0;
  if (kind_ == Kind::kStrided) {
    const auto of_piece = [&](int64_t piece) {
      const Interval range = chunk_at(piece, ceil_divide(piece, k), coordinate);
      return range.end - range.begin;
    };
    const int64_t piece = ceil_divide(n, parameter_);
    return n / piece * of_piece(piece) + of_piece(n % piece);
  }
  if (kind_ == Kind::kCyclic) {
    const int64_t period = k * parameter_;
    return n / period * parameter_ + std::clamp<int64_t>(n % period - coordinate * parameter_, 0, parameter_);
  }
  if (kind_ == Kind::kRagged) return component(static_cast<size_t>(coordinate)).extent();
  if (kind_ == Kind::kBlocks) return chunk_at(n, chunk_length(n, k), coordinate).extent();
  if (kind_ == Kind::kOwned) return coordinate == parameter_ ? n : 0;
  return shardwright::length(positions(n, k, coordinate, 0));
}

int64_t CutRule::runs(int64_t n, int64_t k) const {
  if (kind_ == Kind::kStrided) return parameter_;
  if (kind_ == Kind::kCyclic) return std::max<int64_t>(ceil_divide(ceil_divide(n, parameter_), k), 1);
  if (pieces_) {
    size_t most = 1;
    for (const IntervalList& list : pieces_->lists) most = std::max(most, list.size());
    return static_cast<int64_t>(most);
  }
  return kind_ == Kind::kPacked ? static_cast<int64_t>(ends_->size()) : 1;
}

bool CutRule::cuts_evenly_otherwise(int64_t n, int64_t k) const {
  if (n == 0 || k == 1) return true;
  switch (kind_) {
    case Kind::kStrided:
      break;
    case Kind::kPieces:
      if (!is_partition()) return false;
      [[fallthrough]];
    case Kind::kRagged: {
      const std::vector<int64_t> all = sizes();
      return std::all_of(all.begin(), all.end(), [&](int64_t size) { return size == all[0]; });
    }
    case Kind::kBlocks:
      return chunk_length(n, k) * k == n;
    case Kind::kCyclic:
      return n % (k * parameter_) == 0;
    case Kind::kOwned:
      return false;
    case Kind::kPacked: {
      const std::vector<int64_t> all = sizes();
      return std::all_of(all.begin(), all.end(), [&](int64_t size) { return size % (k * parameter_) == 0; });
    }
  }
  throw InvariantError("the kind of a cut rule is unknown");
}

int64_t CutRule::coordinate_of_largest(int64_t, int64_t) const {
  if (kind_ == Kind::kOwned) return parameter_;
  if (kind_ != Kind::kRagged && !pieces_) return 0;
  const std::vector<int64_t> all = sizes();
  return std::max_element(all.begin(), all.end()) - all.begin();
}

int64_t CutRule::coordinate_of_smallest(int64_t, int64_t k) const {
  if (kind_ == Kind::kOwned) return parameter_ == k - 1 ? 0 : k - 1;
  if (kind_ != Kind::kRagged && !pieces_) return k - 1;
  const std::vector<int64_t> all = sizes();
  return std::min_element(all.begin(), all.end()) - all.begin();
}

Interval CutRule::coordinates_of(Interval range, int64_t n, int64_t k) const {
  if (!makes_runs()) return {0, k};
  if (kind_ == Kind::kOwned) return {parameter_, parameter_ + 1};
  if (kind_ == Kind::kRagged) {
    const auto first = std::upper_bound(ends_->begin(), ends_->end(), range.begin);
    const auto last = std::lower_bound(ends_->begin(), ends_->end(), range.end);
    return {first - ends_->begin(), last - ends_->begin() + 1};
  }
  const int64_t chunk = chunk_length(n, k);
  return {range.begin / chunk, (range.end - 1) / chunk + 1};
}

// Chunks are full chunks first, then at most one short chunk, then empty chunks. Parts of other rules are compared.
std::vector<int64_t> CutRule::starts_of_like_parts(int64_t n, int64_t k) const {
  std::vector<int64_t> starts{0};
  if (n == 0) return starts;
  if (is_chunks() || kind_ == Kind::kBlocks) {
    const int64_t chunk = chunk_length(n, k);
    const int64_t full = n / chunk;
    if (full > 0 && full < k) starts.push_back(full);
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
  if (!is_partition() || !cuts_evenly(n, k)) return std::nullopt;
  if (kind_ == Kind::kStrided) return parameter_;
  if (n == 0 || k == 1) return 1;
  if (kind_ == Kind::kCyclic) return n / (k * parameter_);
  if (pieces_) return std::nullopt;
  if (kind_ != Kind::kPacked) return 1;
  const std::vector<int64_t> all = sizes();
  if (std::any_of(all.begin(), all.end(), [&](int64_t size) { return size != all[0]; })) return std::nullopt;
  return static_cast<int64_t>(all.size());
}

std::optional<CutRule> CutRule::with_gathered(const CutRule& earlier, int64_t k) const {
  if (!is_strided_or_chunks() || !earlier.is_strided_or_chunks()) return std::nullopt;
  if (parameter_ % earlier.parameter_ != 0) return std::nullopt;
  return CutRule(parameter_ * k);
}

std::optional<CutRule> CutRule::moved_after(const CutRule& later, int64_t k) const {
  if (!is_strided_or_chunks() || !later.is_strided_or_chunks()) return std::nullopt;
  if (parameter_ % (later.parameter_ * k) != 0) return std::nullopt;
  return CutRule(parameter_ / k);
}

// A strided cut is encoded as its split factor, which is positive. Other encodings begin with the negated kind, then:
//   blocks, cyclic, owned   the number
//   ragged, packed          number of sizes, the sizes, and the unit of a packed rule if above 1
//   pieces                  for each coordinate, the number of intervals, and their begins and ends
void CutRule::append_encoding(std::vector<int64_t>& encoding) const {
  if (kind_ != Kind::kStrided) encoding.push_back(-static_cast<int64_t>(kind_));
  if (pieces_) {
    for (const IntervalList& list : pieces_->lists) {
      encoding.push_back(static_cast<int64_t>(list.size()));
      for (const Interval& interval : list) encoding.insert(encoding.end(), {interval.begin, interval.end});
    }
    return;
  }
  if (!ends_) return encoding.push_back(parameter_);
  const std::vector<int64_t> all = sizes();
  encoding.push_back(static_cast<int64_t>(all.size()));
  encoding.insert(encoding.end(), all.begin(), all.end());
  if (kind_ == Kind::kPacked && parameter_ > 1) encoding.push_back(parameter_);
}

// Returns the lists of an encoded rule of pieces, or nullopt if the encoding is malformed.
std::optional<std::vector<std::vector<Interval>>> CutRule::lists_from_encoding(const std::vector<int64_t>& encoding) {
  std::vector<std::vector<Interval>> lists;
  for (size_t at = 1; at < encoding.size();) {
    const auto left = static_cast<int64_t>(encoding.size() - at - 1);
    const int64_t count = encoding[at++];
    if (count < 0 || count > left / 2) return std::nullopt;
    std::vector<Interval>& list = lists.emplace_back();
    for (int64_t i = 0; i < count; ++i, at += 2) list.push_back({encoding[at], encoding[at + 1]});
  }
  return lists;
}

CutRule CutRule::from_encoding(const std::vector<int64_t>& encoding) {
  const auto has_length = [&](size_t length) { return encoding.size() == length; };
  if (has_length(1) && encoding[0] > 0) return CutRule(encoding[0]);
  if (encoding.size() >= 2) {
    const bool has_sizes = encoding[1] >= 0 && static_cast<uint64_t>(encoding[1]) == encoding.size() - 2;
    const std::vector<int64_t> sizes(encoding.begin() + 2, encoding.end());
    const bool has_unit =
        encoding[1] >= 0 && static_cast<uint64_t>(encoding[1]) + 3 == encoding.size() && encoding.back() > 1;
    if (encoding[0] == -static_cast<int64_t>(Kind::kPacked) && has_unit) {
      return packed({encoding.begin() + 2, encoding.end() - 1}, encoding.back());
    }
    if (encoding[0] == -static_cast<int64_t>(Kind::kPieces)) {
      if (const auto lists = lists_from_encoding(encoding)) return pieces(*lists);
    }
    if (encoding[0] == -static_cast<int64_t>(Kind::kRagged) && has_sizes) return ragged(sizes);
    if (encoding[0] == -static_cast<int64_t>(Kind::kPacked) && has_sizes) return packed(sizes);
    if (encoding[0] == -static_cast<int64_t>(Kind::kBlocks) && has_length(2)) return blocks(encoding[1]);
    if (encoding[0] == -static_cast<int64_t>(Kind::kCyclic) && has_length(2)) return cyclic(encoding[1]);
    if (encoding[0] == -static_cast<int64_t>(Kind::kOwned) && has_length(2)) return owned(encoding[1]);
  }
  throw UserError(concat("placements: numbers of a cut must encode a cut rule, got (", join(encoding), ")"));
}

size_t CutRule::hash() const {
  if (kind_ == Kind::kStrided) return static_cast<size_t>(parameter_);
  std::vector<int64_t> encoding;
  append_encoding(encoding);
  uint64_t hash = 0;
  for (const int64_t value : encoding) hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 32);
}

bool CutRule::operator==(const CutRule& other) const {
  return kind_ == other.kind_ && parameter_ == other.parameter_ &&
         (ends_ == other.ends_ || (ends_ && other.ends_ && *ends_ == *other.ends_)) &&
         (pieces_ == other.pieces_ || (pieces_ && other.pieces_ && *pieces_ == *other.pieces_));
}

std::string CutRule::text(int64_t tensor_dim) const {
  switch (kind_) {
    case Kind::kStrided:
      return parameter_ == 1 ? concat("S(", tensor_dim, ")") : concat("SS(", tensor_dim, ",", parameter_, ")");
    case Kind::kRagged:
      return concat("Ragged(", tensor_dim, ",", join(sizes(), ":"), ")");
    case Kind::kBlocks:
      return concat("Blocks(", tensor_dim, ",", parameter_, ")");
    case Kind::kCyclic:
      return concat("Cyclic(", tensor_dim, ",", parameter_, ")");
    case Kind::kOwned:
      return concat("Owned(", tensor_dim, ",", parameter_, ")");
    case Kind::kPacked:
      return concat("Packed(", tensor_dim, ",", join(sizes(), ":"), parameter_ > 1 ? concat(",", parameter_) : "", ")");
    case Kind::kPieces: {
      std::vector<std::string> texts;
      for (const IntervalList& list : pieces_->lists) {
        std::vector<std::string> intervals;
        for (const Interval& interval : list) intervals.push_back(concat(interval.begin, "-", interval.end));
        texts.push_back(join(intervals, "+"));
      }
      return concat("Pieces(", tensor_dim, ",", join(texts, ":"), ")");
    }
  }
  throw InvariantError("the kind of a cut rule is unknown");
}

}  // namespace shardwright
