#include "layout/region.h"

#include <gtest/gtest.h>

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

TEST(Region, ListsStayCanonical) {
  const IntervalList list = CutRule(2).part({{0, 8}}, 2, 1);
  EXPECT_EQ(list, (IntervalList{{2, 4}, {6, 8}}));
  EXPECT_EQ(CutRule(2).part({{0, 8}}, 1, 0), (IntervalList{{0, 8}})) << "touching pieces are one interval";
}

TEST(Region, IntersectFindsEverySharedElementOnce) {
  for (int64_t n = 0; n <= 16; ++n) {
    for (int64_t i = 0; i < 2; ++i) {
      for (int64_t j = 0; j < 3; ++j) {
        const IntervalList a = CutRule(3).part({{0, n}}, 2, i);
        const IntervalList b = CutRule(2).part({{0, n}}, 3, j);
        const auto a_elements = elements(a);
        const auto b_elements = elements(b);
        std::vector<int64_t> expected;
        for (const int64_t element : a_elements) {
          if (std::find(b_elements.begin(), b_elements.end(), element) != b_elements.end()) expected.push_back(element);
        }
        std::vector<int64_t> found;
        for (const Piece& piece : intersect(a, b)) {
          for (int64_t x = 0; x < piece.length; ++x) {
            EXPECT_EQ(a_elements[piece.a_position + x], b_elements[piece.b_position + x]);
            found.push_back(a_elements[piece.a_position + x]);
          }
        }
        EXPECT_EQ(found, expected);
        EXPECT_EQ(intersection_length(a, b), static_cast<int64_t>(expected.size()));
      }
    }
  }
}

}  // namespace
}  // namespace shardwright
