#include "views/match_rule.h"

#include <algorithm>
#include <numeric>

#include "support/ceil_divide.h"

namespace shardwright {
namespace {

constexpr int64_t kMaxTried = 4096;  // maximum number of split factors, and of divisors of a chunk, that are tried

// Returns true if the rule divides a list of n elements into exactly these parts.
bool makes_division(const CutRule& rule, const Division& division) {
  const auto k = static_cast<int64_t>(division.parts.size());
  if (!rule.why_not(division.n, k).empty()) return false;
  IntervalList full;
  append(full, {0, division.n});
  for (int64_t c = 0; c < k; ++c) {
    if (rule.part(full, k, c) != division.parts[static_cast<size_t>(c)]) return false;
  }
  return true;
}

// Returns true if the rule makes all of these divisions.
bool makes_all_divisions(const CutRule& rule, const std::vector<Division>& divisions) {
  return std::all_of(divisions.begin(), divisions.end(),
                     [&](const Division& division) { return makes_division(rule, division); });
}

// The functions below return candidate rules, derived from the division of the longest list (`largest`). Candidates
// need not make the other divisions: matching_rule() checks that.

// Returns the strided cuts that fit coordinate 0. Coordinate 0 gets the beginning of each piece, so its second interval
// begins where the second piece begins.
std::vector<CutRule> strided_cuts(const Division& largest) {
  const IntervalList& first = largest.parts[0];
  std::vector<CutRule> rules;
  if (first.size() < 2 || first[0].begin != 0 || first[1].begin < first[0].end) return rules;
  const int64_t piece = first[1].begin;
  const int64_t n = largest.n;
  for (int64_t factor = ceil_divide(n, piece); ceil_divide(n, factor) == piece && factor <= n; ++factor) {
    if (static_cast<int64_t>(rules.size()) == kMaxTried) break;
    rules.emplace_back(factor);
  }
  return rules;
}

// Returns the rule with the largest block length that divides all interval bounds.
std::vector<CutRule> cuts_in_common_blocks(const std::vector<Division>& divisions) {
  int64_t unit = 0;
  for (const Division& division : divisions) {
    for (const IntervalList& part : division.parts) {
      for (const Interval& interval : part) unit = std::gcd(unit, std::gcd(interval.begin, interval.end));
    }
  }
  if (unit < 2 || unit > CutRule::kMaxBlock) return {};
  return {CutRule::blocks(unit)};
}

// Returns the rules with blocks that divide the chunk of coordinate 0.
std::vector<CutRule> cuts_in_blocks(const Division& largest) {
  const IntervalList& first = largest.parts[0];
  std::vector<CutRule> rules;
  if (first.size() != 1 || first[0].begin != 0) return rules;
  const int64_t chunk = first[0].end;
  const auto add = [&](int64_t block) {
    if (block > 1 && block <= CutRule::kMaxBlock) rules.push_back(CutRule::blocks(block));
  };
  for (int64_t b = 1; b <= kMaxTried && b <= chunk; ++b) {
    if (chunk % b != 0) continue;
    add(b);
    add(chunk / b);
  }
  return rules;
}

// Returns the rule that gives everything to one coordinate, if a coordinate has everything.
std::vector<CutRule> owned_cuts(const Division& largest) {
  for (size_t c = 0; c < largest.parts.size(); ++c) {
    if (length(largest.parts[c]) == largest.n) return {CutRule::owned(static_cast<int64_t>(c))};
  }
  return {};
}

// Returns the rule with blocks as long as the first interval of coordinate 0.
std::vector<CutRule> cyclic_cuts(const Division& largest) {
  const IntervalList& first = largest.parts[0];
  if (first.empty() || first[0].end > CutRule::kMaxBlock) return {};
  return {CutRule::cyclic(first[0].end - first[0].begin)};
}

// Returns true if the parts together have every position, and few enough intervals for a rule of pieces.
bool covers(const Division& division) {
  std::vector<Interval> all;
  for (const IntervalList& part : division.parts) all.insert(all.end(), part.begin(), part.end());
  if (static_cast<int64_t>(all.size()) > CutRule::kMaxRuns) return false;
  int64_t covered = 0;
  for (const Interval& interval : sorted_by_begin(all)) {
    if (interval.begin > covered) return false;
    covered = std::max(covered, interval.end);
  }
  return covered == division.n;
}

// Returns the rule with the lengths of the parts.
std::vector<CutRule> ragged_cuts(const Division& largest) {
  std::vector<int64_t> sizes;
  for (const IntervalList& part : largest.parts) sizes.push_back(length(part));
  return {CutRule::ragged(sizes)};
}

// Returns the rule with the intervals of the parts, if these contain every position.
std::vector<CutRule> cuts_in_pieces(const Division& largest) {
  if (!covers(largest)) return {};
  std::vector<std::vector<Interval>> lists;
  for (const IntervalList& part : largest.parts) lists.emplace_back(part.begin(), part.end());
  return {CutRule::pieces(lists)};
}

}  // namespace

std::optional<CutRule> matching_rule(const std::vector<Division>& divisions) {
  const Division& largest = *std::max_element(divisions.begin(), divisions.end(),
                                              [](const Division& a, const Division& b) { return a.n < b.n; });
  const auto matching = [&](const std::vector<CutRule>& rules) -> std::optional<CutRule> {
    for (const CutRule& rule : rules) {
      if (makes_all_divisions(rule, divisions)) return rule;
    }
    return std::nullopt;
  };
  if (const auto found = matching({CutRule()})) return found;
  if (const auto found = matching(strided_cuts(largest))) return found;
  if (const auto found = matching(owned_cuts(largest))) return found;
  if (const auto found = matching(cuts_in_common_blocks(divisions))) return found;
  if (const auto found = matching(ragged_cuts(largest))) return found;
  if (const auto found = matching(cyclic_cuts(largest))) return found;
  if (const auto found = matching(cuts_in_blocks(largest))) return found;
  return matching(cuts_in_pieces(largest));
}

}  // namespace shardwright
