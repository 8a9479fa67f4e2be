#include "layout/cut_rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "layout/layout.h"
#include "layouts.h"
#include "naive.h"
#include "support/error.h"

namespace shardwright {
namespace {

using Elements = std::vector<int64_t>;

Elements elements(const IntervalList& list) {
  Elements out;
  for (const Interval& interval : list) {
    for (int64_t i = interval.begin; i < interval.end; ++i) out.push_back(i);
  }
  return out;
}

// A rule, and an oracle that finds the part of a coordinate element by element.
struct Case {
  std::string name;
  CutRule rule;
  std::function<Elements(const Elements&, int64_t k, int64_t coordinate)> part;
};

std::vector<Case> strided_cases() {
  std::vector<Case> all{{"chunks", CutRule(), naive::chunk}};
  for (int64_t f = 2; f <= 5; ++f) {
    all.push_back({"strided by " + std::to_string(f), CutRule(f),
                   [f](const Elements& list, int64_t k, int64_t c) { return naive::strided_chunk(list, f, k, c); }});
  }
  return all;
}

std::vector<Case> cases() {
  std::vector<Case> all = strided_cases();
  for (const Elements& sizes : {Elements{3, 1, 4}, {0, 2, 0, 5, 1}, {2, 2, 2}, {7, 7}, {5}, {0, 0}, {0, 12, 0}}) {
    all.push_back({"ragged " + join(sizes), CutRule::ragged(sizes),
                   [sizes](const Elements& list, int64_t, int64_t c) { return naive::ragged(list, sizes, c); }});
  }
  for (const Elements& sizes : {Elements{8, 4, 4}, {3, 0, 5}, {6, 6}, {1, 2, 7, 2}, {12}, {0}}) {
    all.push_back({"packed " + join(sizes), CutRule::packed(sizes),
                   [sizes](const Elements& list, int64_t k, int64_t c) { return naive::packed(list, sizes, k, c); }});
  }
  for (const int64_t block : {1, 2, 3, 128}) {
    all.push_back({"blocks of " + std::to_string(block), CutRule::blocks(block),
                   [block](const Elements& list, int64_t k, int64_t c) { return naive::blocks(list, block, k, c); }});
    all.push_back({"cyclic by " + std::to_string(block), CutRule::cyclic(block),
                   [block](const Elements& list, int64_t k, int64_t c) { return naive::cyclic(list, block, k, c); }});
  }
  for (const int64_t owner : {0, 2}) {
    all.push_back({"owned by " + std::to_string(owner), CutRule::owned(owner),
                   [owner](const Elements& list, int64_t, int64_t c) { return c == owner ? list : Elements(); }});
  }
  return all;
}

template <typename Check>
void for_each_case(int64_t most, const Check& check) {
  for (const Case& one : cases()) {
    int checked = 0;
    for (int64_t n = 0; n <= most; ++n) {
      for (int64_t k = 1; k <= 5; ++k) {
        if (!one.rule.why_not(n, k).empty()) continue;
        SCOPED_TRACE(one.name + ", " + std::to_string(n) + " elements over " + std::to_string(k));
        std::vector<Elements> parts;
        for (int64_t c = 0; c < k; ++c) parts.push_back(one.part(naive::iota(n), k, c));
        check(one.rule, n, k, parts);
        ++checked;
      }
    }
    EXPECT_GE(checked, 1) << one.name;
  }
}

IntervalList whole(int64_t n) { return n > 0 ? IntervalList{{0, n}} : IntervalList(); }

int64_t runs_of(const Elements& part) {
  int64_t runs = part.empty() ? 0 : 1;
  for (size_t i = 1; i < part.size(); ++i) runs += part[i] != part[i - 1] + 1;
  return runs;
}

TEST(CutRule, PartsMatchAnElementwiseOracle) {
  for_each_case(24, [](const CutRule& rule, int64_t n, int64_t k, const std::vector<Elements>& parts) {
    for (int64_t c = 0; c < k; ++c) {
      EXPECT_EQ(elements(rule.part(whole(n), k, c)), parts[c]);
      EXPECT_EQ(rule.length(n, k, c), static_cast<int64_t>(parts[c].size()));
      EXPECT_LE(runs_of(parts[c]), rule.runs(n, k));
    }
  });
}

TEST(CutRule, PartsOfListsWithGapsUseLocalPositions) {
  for (const IntervalList& list : {IntervalList{{2, 5}, {7, 8}, {11, 17}, {20, 21}}, {{0, 3}, {4, 9}}}) {
    const Elements all = elements(list);
    for (const Case& one : cases()) {
      if (!one.rule.why_not(length(list), 3).empty()) continue;
      for (int64_t c = 0; c < 3; ++c) EXPECT_EQ(elements(one.rule.part(list, 3, c)), one.part(all, 3, c)) << one.name;
    }
  }
}

TEST(CutRule, NestedCutsUseLocalPositions) {
  for (int64_t n = 0; n <= 25; ++n) {
    for (const Case& outer : cases()) {
      for (const Case& inner : cases()) {
        for (int64_t i = 0; i < 3 && outer.rule.why_not(n, 3).empty(); ++i) {
          if (!inner.rule.why_not(outer.rule.length(n, 3, i), 2).empty()) continue;
          const Elements expected = inner.part(outer.part(naive::iota(n), 3, i), 2, 1);
          EXPECT_EQ(elements(inner.rule.part(outer.rule.part(whole(n), 3, i), 2, 1)), expected);
        }
      }
    }
  }
}

TEST(CutRule, ReportsEqualPartsAndTheLargestPart) {
  for_each_case(60, [](const CutRule& rule, int64_t n, int64_t k, const std::vector<Elements>& parts) {
    size_t most = 0;
    size_t least = parts[0].size();
    bool are_equal = true;
    bool descends = true;
    for (const Elements& part : parts) {
      most = std::max(most, part.size());
      least = std::min(least, part.size());
      are_equal = are_equal && part.size() == parts[0].size();
    }
    for (size_t c = 1; c < parts.size(); ++c) descends = descends && parts[c].size() <= parts[c - 1].size();
    EXPECT_EQ(parts[rule.coordinate_of_largest(n, k)].size(), most);
    EXPECT_EQ(parts[rule.coordinate_of_smallest(n, k)].size(), least);
    EXPECT_TRUE(are_equal || !rule.cuts_evenly(n, k));
    EXPECT_TRUE(rule.cuts_evenly(n, k) || !are_equal || rule.is_strided_or_chunks());
    EXPECT_TRUE(descends || !rule.descends());
    if (rule.longer_lists_have_larger_parts() && rule.why_not(n + 1, k).empty()) {
      const auto longest_part = [&](int64_t list_length) {
        return rule.length(list_length, k, rule.coordinate_of_largest(list_length, k));
      };
      EXPECT_LE(longest_part(n), longest_part(n + 1));
    }
  });
}

TEST(CutRule, RulesWithAnEqualSplitFactorMatchStridedCuts) {
  for_each_case(60, [](const CutRule& rule, int64_t n, int64_t k, const std::vector<Elements>& parts) {
    const std::optional<int64_t> factor = rule.equal_split_factor(n, k);
    EXPECT_TRUE(rule.cuts_evenly(n, k) || !factor);
    if (!factor) return;
    ASSERT_EQ(n % (*factor * k), 0);
    for (int64_t c = 0; c < k; ++c) EXPECT_EQ(parts[c], naive::strided_chunk(naive::iota(n), *factor, k, c));
  });
}

TEST(CutRule, CoordinatesOfARangeIncludeEveryOneThatHoldsPartOfIt) {
  for_each_case(16, [](const CutRule& rule, int64_t n, int64_t k, const std::vector<Elements>& parts) {
    for (int64_t begin = 0; begin < n; ++begin) {
      for (int64_t end = begin + 1; end <= n; ++end) {
        const Interval found = rule.coordinates_of({begin, end}, n, k);
        EXPECT_LE(0, found.begin);
        EXPECT_LE(found.end, k);
        for (int64_t c = 0; c < k; ++c) {
          const bool overlaps = std::any_of(parts[c].begin(), parts[c].end(),
                                            [&](int64_t element) { return begin <= element && element < end; });
          const bool is_named = found.begin <= c && c < found.end;
          EXPECT_TRUE(is_named || !overlaps);
          EXPECT_TRUE(!is_named || overlaps || parts[c].empty() || !rule.makes_runs());
        }
      }
    }
  });
}

TEST(CutRule, RangesOfEqualPartsBeginWhereThePartChanges) {
  for_each_case(40, [](const CutRule& rule, int64_t n, int64_t k, std::vector<Elements> parts) {
    for (Elements& part : parts) {
      const int64_t first = part.empty() ? 0 : part[0];
      for (int64_t& element : part) element -= first;
    }
    Elements expected{0};
    for (int64_t c = 1; c < k; ++c) {
      if (parts[c] != parts[c - 1]) expected.push_back(c);
    }
    EXPECT_EQ(rule.starts_of_like_parts(n, k), expected);
  });
}

TEST(CutRule, GatheringTheOuterCutUnitesThePartsOfItsCoordinates) {
  int num_rules = 0;
  for (const Case& outer : strided_cases()) {
    for (const Case& inner : strided_cases()) {
      const std::optional<CutRule> rule = inner.rule.with_gathered(outer.rule, 3);
      if (!rule) continue;
      ++num_rules;
      const int64_t n = 2 * 3 * outer.rule.split_factor() * inner.rule.split_factor() * 2;
      for (int64_t c = 0; c < 2; ++c) {
        Elements held;
        for (int64_t i = 0; i < 3; ++i) {
          for (const int64_t element : inner.part(outer.part(naive::iota(n), 3, i), 2, c)) held.push_back(element);
        }
        std::sort(held.begin(), held.end());
        EXPECT_EQ(elements(rule->part(whole(n), 2, c)), held) << outer.name << ", then " << inner.name;
      }
    }
  }
  EXPECT_GE(num_rules, 8);
}

TEST(CutRule, MovingTheOuterCutInsideKeepsTheParts) {
  int num_rules = 0;
  for (const Case& outer : strided_cases()) {
    for (const Case& inner : strided_cases()) {
      const std::optional<CutRule> rule = outer.rule.moved_after(inner.rule, 2);
      if (!rule) continue;
      ++num_rules;
      const int64_t n = 3 * outer.rule.split_factor() * 2 * inner.rule.split_factor();
      for (int64_t i = 0; i < 3; ++i) {
        for (int64_t j = 0; j < 2; ++j) {
          const Elements expected = inner.part(outer.part(naive::iota(n), 3, i), 2, j);
          EXPECT_EQ(elements(rule->part(inner.rule.part(whole(n), 2, j), 3, i)), expected);
        }
      }
    }
  }
  EXPECT_GE(num_rules, 3);
}

TEST(CutRule, EncodingsAndHashesDistinguishRules) {
  const std::vector<Case> all = cases();
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < all.size(); ++j) {
      std::vector<int64_t> a;
      std::vector<int64_t> b;
      all[i].rule.append_encoding(a);
      all[j].rule.append_encoding(b);
      EXPECT_EQ(CutRule::from_encoding(a), all[i].rule);
      EXPECT_EQ(all[i].rule == all[j].rule, i == j);
      EXPECT_EQ(a == b, i == j);
      EXPECT_EQ(all[i].rule.hash() == all[j].rule.hash(), i == j);
    }
  }
}

TEST(CutRule, OnlyStridedCutsAndChunksAreGatheredOrReordered) {
  for (const Case& one : cases()) {
    for (const Case& other : cases()) {
      const bool both = one.rule.is_strided_or_chunks() && other.rule.is_strided_or_chunks();
      EXPECT_TRUE(both || (!one.rule.with_gathered(other.rule, 2) && !one.rule.moved_after(other.rule, 2)));
    }
  }
}

TEST(CutRule, ErrorsNameSizesThatDoNotMatchTheList) {
  const std::string sum_is_four = "sum of the sizes must be 5, the number of elements to cut, got 4";
  EXPECT_EQ(CutRule::ragged({3, 1}).why_not(5, 2), sum_is_four);
  EXPECT_EQ(CutRule::packed({3, 1}).why_not(5, 2), sum_is_four);
  EXPECT_EQ(CutRule::ragged({3, 2}).why_not(5, 3), "number of sizes must be 3, one per coordinate, got 2");
  EXPECT_EQ(CutRule::owned(3).why_not(5, 3), "coordinate must be in [0, 2], got 3");
  EXPECT_EQ(CutRule::cyclic(1).why_not(int64_t{1} << 22, 2),
            "number of blocks per coordinate must be at most 2^20, got 2097152 for 4194304 elements");
  EXPECT_EQ(CutRule::cyclic(4).why_not(int64_t{1} << 22, 2), "");
}

void expect_refused(const std::function<void()>& make, const std::string& text) {
  try {
    make();
    FAIL() << "no error: " << text;
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(CutRule, NumbersOutOfRangeAreRejected) {
  const int64_t huge = std::numeric_limits<int64_t>::max();
  expect_refused([] { CutRule::ragged({}); }, "sizes of Ragged must be a list of at least one integer, got none");
  expect_refused([] { CutRule::ragged({2, -1}); }, "sizes of Ragged must be at least 0, got -1");
  expect_refused([=] { CutRule::packed({huge, huge}); }, "sum of the sizes of Packed must be at most 2^57");
  expect_refused([] { CutRule::blocks(0); }, "block of Blocks must be in [1, 2^31], got 0");
  expect_refused([=] { CutRule::cyclic(huge); }, "block of Cyclic must be in [1, 2^31], got 9223372036854775807");
  expect_refused([] { CutRule::owned(-1); }, "coordinate of Owned must be at least 0, got -1");
  for (const Elements& encoding : {Elements{}, {0}, {-9, 1}, {-1, 3, 1}, {-2, 0}, {-1, huge}, {-5, -1}, {3, 3}}) {
    EXPECT_THROW(CutRule::from_encoding(encoding), UserError) << join(encoding);
  }
}

bool fits(const Mesh& mesh, int64_t n, const std::vector<Cut>& cuts) {
  for (int64_t p = 0; p < mesh.size(); ++p) {
    for (size_t i = 0; i < cuts.size(); ++i) {
      const int64_t parent = length(part_at(mesh, n, std::span(cuts).first(i), p));
      if (!cuts[i].rule.why_not(parent, mesh.dim_size(cuts[i].mesh_dim)).empty()) return false;
    }
  }
  return true;
}

// A strided cut may give more of a shorter list: 7 of 13 elements, but 8 of 12.
TEST(CutRule, NoRankHoldsMoreThanTheLargestPosition) {
  const MeshPtr mesh = test::mesh_of({3, 2, 4});
  for (int64_t n = 0; n <= 80; ++n) {
    for (const Case& a : cases()) {
      for (const Case& b : cases()) {
        for (const Case& c : {cases()[0], cases()[3]}) {
          if (!fits(*mesh, n, {{1, a.rule}, {2, b.rule}})) continue;
          const std::vector<Cut> cuts{{1, a.rule}, {2, b.rule}, {0, c.rule}};
          const int64_t largest = largest_position(*mesh, n, cuts);
          int64_t most = 0;
          for (int64_t p = 0; p < mesh->size(); ++p) most = std::max(most, length(part_at(*mesh, n, cuts, p)));
          EXPECT_EQ(length(part_at(*mesh, n, cuts, largest)), most) << n << " " << a.name << b.name << c.name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace shardwright
