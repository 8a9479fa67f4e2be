#include "layout/cut_rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "layout/layout.h"
#include "layouts.h"
#include "naive.h"

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

// A rule, and what it must give a coordinate of a list, found element by element.
struct Case {
  std::string name;
  CutRule rule;
  std::function<Elements(const Elements&, int64_t k, int64_t coordinate)> part;
};

std::vector<Case> cases() {
  std::vector<Case> all{{"chunks", CutRule(), naive::chunk}};
  for (int64_t f = 2; f <= 5; ++f) {
    all.push_back({"strided by " + std::to_string(f), CutRule(f),
                   [f](const Elements& list, int64_t k, int64_t c) { return naive::strided_chunk(list, f, k, c); }});
  }
  return all;
}

template <typename Check>
void for_each_case(int64_t most, const Check& check) {
  for (const Case& one : cases()) {
    for (int64_t n = 0; n <= most; ++n) {
      for (int64_t k = 1; k <= 5; ++k) {
        SCOPED_TRACE(one.name + ", " + std::to_string(n) + " elements over " + std::to_string(k));
        std::vector<Elements> parts;
        for (int64_t c = 0; c < k; ++c) parts.push_back(one.part(naive::iota(n), k, c));
        check(one.rule, n, k, parts);
      }
    }
  }
}

IntervalList whole(int64_t n) { return n > 0 ? IntervalList{{0, n}} : IntervalList(); }

int64_t runs_of(const Elements& part) {
  int64_t runs = part.empty() ? 0 : 1;
  for (size_t i = 1; i < part.size(); ++i) runs += part[i] != part[i - 1] + 1;
  return runs;
}

TEST(CutRule, PartsAreThoseOfAWalkOverElements) {
  for_each_case(24, [](const CutRule& rule, int64_t n, int64_t k, const std::vector<Elements>& parts) {
    for (int64_t c = 0; c < k; ++c) {
      EXPECT_EQ(elements(rule.part(whole(n), k, c)), parts[c]);
      EXPECT_EQ(rule.length(n, k, c), static_cast<int64_t>(parts[c].size()));
      EXPECT_LE(runs_of(parts[c]), rule.runs(n, k));
    }
  });
}

TEST(CutRule, PartsOfListsWithGapsGoByLocalPosition) {
  const IntervalList list{{2, 5}, {7, 8}, {11, 17}, {20, 21}};
  const Elements all = elements(list);
  for (const Case& one : cases()) {
    for (int64_t c = 0; c < 3; ++c) EXPECT_EQ(elements(one.rule.part(list, 3, c)), one.part(all, 3, c)) << one.name;
  }
}

TEST(CutRule, NestedCutsTakeLocalPositions) {
  for (int64_t n = 0; n <= 25; ++n) {
    for (const Case& outer : cases()) {
      for (const Case& inner : cases()) {
        for (int64_t i = 0; i < 3; ++i) {
          const Elements expected = inner.part(outer.part(naive::iota(n), 3, i), 2, 1);
          EXPECT_EQ(elements(inner.rule.part(outer.rule.part(whole(n), 3, i), 2, 1)), expected);
        }
      }
    }
  }
}

TEST(CutRule, SaysWhichPartsAreEqualAndWhichIsLargest) {
  for_each_case(60, [](const CutRule& rule, int64_t n, int64_t k, const std::vector<Elements>& parts) {
    size_t most = 0;
    bool are_equal = true;
    for (const Elements& part : parts) {
      most = std::max(most, part.size());
      are_equal = are_equal && part.size() == parts[0].size();
    }
    EXPECT_EQ(parts[rule.largest(n, k)].size(), most);
    EXPECT_TRUE(are_equal || !rule.cuts_evenly(n, k));
    if (rule.longer_lists_have_larger_parts()) {
      EXPECT_LE(rule.length(n, k, rule.largest(n, k)), rule.length(n + 1, k, rule.largest(n + 1, k)));
    }
  });
}

TEST(CutRule, EqualPartsAreThoseOfAStridedCut) {
  for_each_case(60, [](const CutRule& rule, int64_t n, int64_t k, const std::vector<Elements>& parts) {
    const std::optional<int64_t> factor = rule.equal_split_factor(n, k);
    EXPECT_EQ(factor.has_value(), rule.cuts_evenly(n, k));
    if (!factor) return;
    ASSERT_EQ(n % (*factor * k), 0);
    for (int64_t c = 0; c < k; ++c) EXPECT_EQ(parts[c], naive::strided_chunk(naive::iota(n), *factor, k, c));
  });
}

TEST(CutRule, CoordinatesOfARangeAreAllThatHoldSomeOfIt) {
  for_each_case(16, [](const CutRule& rule, int64_t n, int64_t k, const std::vector<Elements>& parts) {
    for (int64_t begin = 0; begin < n; ++begin) {
      for (int64_t end = begin + 1; end <= n; ++end) {
        const Interval found = rule.coordinates_of({begin, end}, n, k);
        EXPECT_LE(0, found.begin);
        EXPECT_LE(found.end, k);
        for (int64_t c = 0; c < k; ++c) {
          const bool meets = std::any_of(parts[c].begin(), parts[c].end(),
                                         [&](int64_t element) { return begin <= element && element < end; });
          const bool is_named = found.begin <= c && c < found.end;
          EXPECT_TRUE(is_named || !meets);
          EXPECT_TRUE(!is_named || meets || !rule.makes_runs());
        }
      }
    }
  });
}

TEST(CutRule, StretchesOfLikePartsBeginWherePartsLookDifferent) {
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

TEST(CutRule, GatheringTheCutBeforeKeepsWhatAllItsCoordinatesHold) {
  int said = 0;
  for (const Case& outer : cases()) {
    for (const Case& inner : cases()) {
      const std::optional<CutRule> rule = inner.rule.with_gathered(outer.rule, 3);
      if (!rule) continue;
      ++said;
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
  EXPECT_GE(said, 8);
}

TEST(CutRule, TakenBehindTheLaterCutItMakesTheSameParts) {
  int said = 0;
  for (const Case& outer : cases()) {
    for (const Case& inner : cases()) {
      const std::optional<CutRule> rule = outer.rule.behind(inner.rule, 2);
      if (!rule) continue;
      ++said;
      const int64_t n = 3 * outer.rule.split_factor() * 2 * inner.rule.split_factor();
      for (int64_t i = 0; i < 3; ++i) {
        for (int64_t j = 0; j < 2; ++j) {
          const Elements expected = inner.part(outer.part(naive::iota(n), 3, i), 2, j);
          EXPECT_EQ(elements(rule->part(inner.rule.part(whole(n), 2, j), 3, i)), expected);
        }
      }
    }
  }
  EXPECT_GE(said, 3);
}

TEST(CutRule, NamesTellRulesApart) {
  const std::vector<Case> all = cases();
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < all.size(); ++j) {
      std::vector<int64_t> a;
      std::vector<int64_t> b;
      all[i].rule.append_name(a);
      all[j].rule.append_name(b);
      EXPECT_EQ(all[i].rule == all[j].rule, i == j);
      EXPECT_EQ(a == b, i == j);
      EXPECT_EQ(all[i].rule.hash() == all[j].rule.hash(), i == j);
    }
  }
}

// A strided cut may make more of the shorter of two lists: 7 of 13, but 8 of 12.
TEST(CutRule, NoRankHoldsMoreThanTheLargestPosition) {
  const MeshPtr mesh = test::mesh_of({3, 2, 4});
  for (int64_t n = 0; n <= 80; ++n) {
    for (const Case& a : cases()) {
      for (const Case& b : cases()) {
        for (const Case& c : {cases()[0], cases()[3]}) {
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
