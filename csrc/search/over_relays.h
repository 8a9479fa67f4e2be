// Chooses relays (search/relays.h) between two layouts, and how many levels of them.
//
// If `few` ranks send `first` messages each, and in every later crossing everybody sends m, they reach
// few * first * (m + 1)^(levels - 1) ranks, because relays are among those that they stand for. From one rank to 2,048,
// at 12 us for a step and 4 us for a message:
//
//   levels       1      2      3      4      5      6
//   first     2048     45     11      6      4      2
//   m                  45     13      6      4      3
//   us       8,204    384    184    144    140    140
//
// So the least messages are found for each number of levels, and the numbers that are predicted to take the least time
// are worked out. Where nodes are known, the last levels may be within nodes, where messages take less.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "search/crossing_cost.h"

namespace shardwright {

// Crossings that follow one another, and what they cost together.
struct OverRelays {
  std::vector<Step> crossings;
  Cost cost;
};

// The number of levels of relays to try for the ranks of a layout, from sizes alone.
class RelayShapes {
 public:
  RelayShapes(const Layout& many, const Topology& topology);

  // The numbers of crossings: between nodes, or between any ranks, and within nodes.
  struct Shape {
    int64_t picoseconds = 0;  // about what they take
    int64_t levels = 2;
    int64_t levels_inside = 0;
    auto operator<=>(const Shape&) const = default;
  };

  // Returns shapes for so many ranks that send at the same time at first, or receive at last; the fastest first.
  std::vector<Shape> all(int64_t few) const;
  // Returns how many ranks of the layout hold something.
  int64_t members() const { return members_; }

 private:
  int64_t time(const Shape& shape, int64_t few) const;

  const Topology& topology_;
  int64_t parts_ = 1;  // all different
  int64_t members_ = 1;
  int64_t bytes_ = 0;  // of the largest part
};

// Returns the cheapest crossings of those that are worked out, over relays of `to` if it `fans_out`, else of `from`.
// Returns nullopt if is_worth(cost), which is true of all costs below some limit, is true of none.
std::optional<OverRelays> cheapest_over_relays(const Layout& from, const Layout& to, bool fans_out,
                                               const PlanOptions& options, const Topology& topology,
                                               const std::function<bool(const Cost&)>& is_worth);

}  // namespace shardwright
