#include "layout/region.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "layout/cut_rule.h"
#include "naive.h"

namespace shardwright {
namespace {

std::vector<int64_t> elements(const IntervalList& list) {
  std::vector<int64_t> out;
  for (const Interval& interval : list) {
    for (int64_t i = interval.begin; i < interval.end; ++i) out.push_back(i);
  }
  return out;
}

// Returns the same list without repetitions.
IntervalList listed(const IntervalList& list) {
  IntervalList out;
  for (const Interval& interval : list) append(out, interval);
  return out;
}

struct Part {
  IntervalList list;
  std::vector<int64_t> elements;  // by naive.h
};

// Cuts n indices by rules with repetitions, and returns the parts of some of the coordinates.
std::vector<Part> parts_of(const Part& whole) {
  const int64_t n = length(whole.list);
  std::vector<Part> parts;
  for (const int64_t k : {1, 2, 3, 5}) {
    for (int64_t c = 0; c < k; c += k - 1 > 0 ? k - 1 : 1) {
      for (int64_t block = 1; block <= 3; ++block) {
        parts.push_back({CutRule::cyclic(block).part(whole.list, k, c), naive::cyclic(whole.elements, block, k, c)});
      }
      for (const int64_t factor : {int64_t{1}, int64_t{4}, int64_t{7}, std::max<int64_t>(n / 5, 1)}) {
        parts.push_back({CutRule(factor).part(whole.list, k, c), naive::strided_chunk(whole.elements, factor, k, c)});
      }
      parts.push_back({CutRule::blocks(3).part(whole.list, k, c), naive::blocks(whole.elements, 3, k, c)});
      parts.push_back({CutRule::packed({n - n / 3, n / 3}).part(whole.list, k, c),
                       naive::packed(whole.elements, {n - n / 3, n / 3}, k, c)});
    }
  }
  return parts;
}

Part whole_of(int64_t n) { return {n > 0 ? IntervalList{{0, n}} : IntervalList(), naive::iota(n)}; }

TEST(Region, ListsStayCanonical) {
  const IntervalList list = CutRule(2).part({{0, 8}}, 2, 1);
  EXPECT_EQ(list, (IntervalList{{2, 4}, {6, 8}}));
  EXPECT_EQ(CutRule(2).part({{0, 8}}, 1, 0), (IntervalList{{0, 8}})) << "touching pieces are one interval";
}

TEST(Region, CutsOfRepeatingListsMatchAnElementwiseOracle) {
  for (const int64_t n : {0, 1, 7, 24, 61, 100}) {
    for (const Part& part : parts_of(whole_of(n))) {
      ASSERT_EQ(elements(part.list), part.elements);
      ASSERT_EQ(length(part.list), static_cast<int64_t>(part.elements.size()));
      ASSERT_TRUE(is_ascending(part.list));
      if (!part.elements.empty()) {
        ASSERT_EQ(span_of(part.list), (Interval{part.elements.front(), part.elements.back() + 1}));
      }
      for (const Part& finer : parts_of(part)) {
        ASSERT_EQ(elements(finer.list), finer.elements) << "of " << n;
        for (size_t i = 1; i < finer.list.size(); ++i) ASSERT_LT(finer.list[i - 1].end, finer.list[i].begin);
      }
    }
  }
}

// Also cuts three levels deep, so that sequences of several intervals repeat.
std::vector<Part> many_parts(int64_t n) {
  std::vector<Part> parts = parts_of(whole_of(n));
  const size_t simple = parts.size();
  for (size_t i = 0; i < simple; i += 3) {
    const std::vector<Part> finer = parts_of(parts[i]);
    for (size_t j = i % 5; j < finer.size(); j += 5) {
      parts.push_back(finer[j]);
      if (j % 4 == 0) parts.push_back(parts_of(finer[j])[i % 30]);
    }
  }
  return parts;
}

std::vector<std::pair<int64_t, int64_t>> shared_places(const Part& a, const Part& b) {
  std::vector<std::pair<int64_t, int64_t>> places;
  for (size_t j = 0; j < b.elements.size(); ++j) {
    const auto found = std::lower_bound(a.elements.begin(), a.elements.end(), b.elements[j]);
    if (found != a.elements.end() && *found == b.elements[j]) {
      places.emplace_back(found - a.elements.begin(), static_cast<int64_t>(j));
    }
  }
  return places;
}

TEST(Region, IntersectFindsEverySharedElementOnce) {
  for (const int64_t n : {1, 16, 61, 96}) {
    const std::vector<Part> parts = many_parts(n);
    for (const Part& a : parts) {
      for (const Part& b : parts) {
        const PieceList pieces = intersect(a.list, b.list);
        std::vector<std::pair<int64_t, int64_t>> found;
        Piece last{0, -1, -1};
        for (const Piece& piece : pieces) {
          ASSERT_GT(piece.length, 0);
          ASSERT_FALSE(last.is_followed_by(piece)) << "pieces that follow each other are one";
          last = piece;
          for (int64_t x = 0; x < piece.length; ++x) found.emplace_back(piece.a_position + x, piece.b_position + x);
        }
        const auto expected = shared_places(a, b);
        ASSERT_EQ(found, expected) << "of " << n;
        const auto shared = static_cast<int64_t>(expected.size());
        ASSERT_EQ(intersection_length(a.list, b.list), shared);
        const SharedRuns runs = shared_runs(a.list, b.list);
        ASSERT_EQ(runs.length, shared);
        ASSERT_EQ(runs.runs, static_cast<int64_t>(pieces.size()));
        if (shared > 0) {
          ASSERT_EQ(std::pair(runs.a_position, runs.b_position), expected.front());
        }
        ASSERT_EQ(a.list == b.list, a.elements == b.elements) << "of " << n;
      }
    }
  }
}

TEST(Region, SharedIndicesAndSubrangesOfRepeatingListsMatchAnOracle) {
  const std::vector<Part> parts = parts_of(whole_of(60));
  for (const Part& a : parts) {
    const auto size = static_cast<int64_t>(a.elements.size());
    for (int64_t begin = 0; begin <= size; begin += 3) {
      for (int64_t end = begin; end <= size; end += 5) {
        ASSERT_EQ(elements(subrange(a.list, begin, end)),
                  std::vector<int64_t>(a.elements.begin() + begin, a.elements.begin() + end));
      }
    }
    std::vector<int64_t> further = a.elements;
    for (int64_t& element : further) element += 7;
    ASSERT_EQ(elements(shifted(a.list, 7)), further);
    for (const Part& b : parts) {
      std::vector<int64_t> both;
      std::set_intersection(a.elements.begin(), a.elements.end(), b.elements.begin(), b.elements.end(),
                            std::back_inserter(both));
      ASSERT_EQ(elements(shared_indices(a.list, b.list)), both);
    }
  }
}

// Lists with the same elements are equal, however many repetitions they store.
TEST(Region, EqualityOfListsIgnoresStoredRepetitions) {
  for (const Part& part : many_parts(75)) {
    const IntervalList plain = listed(part.list);
    EXPECT_EQ(plain, part.list);
    EXPECT_EQ(part.list, plain);
    if (part.list.empty()) continue;
    EXPECT_NE(part.list, shifted(part.list, 1));
    EXPECT_NE(part.list, subrange(plain, 0, length(plain) - 1));
    EXPECT_EQ(moved_to_zero(part.list), shifted(plain, -part.elements.front()));
  }
}

// Pieces that do not ascend are intersected one by one, in the order of the second list.
TEST(Region, IntersectsRepeatingListsWithUnorderedLists) {
  const CutRule pieces = CutRule::pieces({{{40, 60}, {0, 25}}, {{25, 40}}});
  const IntervalList unordered = pieces.part({{0, 60}}, 2, 0);
  const IntervalList cyclic = CutRule::cyclic(1).part({{0, 60}}, 4, 1);
  std::vector<int64_t> found;
  for (const Piece& piece : intersect(cyclic, unordered)) {
    for (int64_t x = 0; x < piece.length; ++x) {
      EXPECT_EQ(elements(cyclic)[piece.a_position + x], elements(unordered)[piece.b_position + x]);
      found.push_back(elements(cyclic)[piece.a_position + x]);
    }
  }
  EXPECT_EQ(found, (std::vector<int64_t>{41, 45, 49, 53, 57, 1, 5, 9, 13, 17, 21}));
  const IntervalList every_other = CutRule::cyclic(1).part(unordered, 2, 1);
  std::vector<int64_t> expected;
  for (size_t i = 1; i < elements(unordered).size(); i += 2) expected.push_back(elements(unordered)[i]);
  EXPECT_EQ(elements(every_other), expected);
  EXPECT_EQ(intersection_length(every_other, cyclic),
            std::count_if(expected.begin(), expected.end(), [](int64_t i) { return i % 4 == 1; }));
}

// For a billion rows, the number of stored and visited items is at most of the order of the square root.
TEST(Region, ListsOfABillionIndicesStoreFewItems) {
  constexpr int64_t n = 1'000'000'007;
  const std::vector<CutRule> rules{CutRule::cyclic(1), CutRule::cyclic(3),  CutRule::cyclic(40'000),
                                   CutRule(1'000),     CutRule(30'000'000), CutRule()};
  for (const CutRule& rule : rules) {
    const IntervalList a = rule.part({{0, n}}, 8, 3);
    EXPECT_LE(a.stored().size(), 2u);
    for (const CutRule& other : rules) {
      int64_t total = 0;
      for (int64_t c = 0; c < 5; ++c) {
        const IntervalList b = other.part({{0, n}}, 5, c);
        const PieceList pieces = intersect(a, b);
        EXPECT_LE(pieces.stored().size(), 4u * 31'623) << rule.text(0) << " and " << other.text(0);
        total += length(pieces);
      }
      EXPECT_EQ(total, length(a)) << rule.text(0) << " and " << other.text(0);
    }
  }
}

}  // namespace
}  // namespace shardwright
