// Chooses relays (search/relays.h) between two layouts, and the number of levels. A level is one crossing: a move from
// a layout on one mesh to a layout on another. With n levels, data passes n - 1 sets of relays.
//
// If `few` ranks send `first` messages each, and in every later crossing each reached rank sends m, the number of
// reached ranks is few * first * (m + 1)^(levels - 1), because a relay is one of the ranks that it stands for. From one
// rank to 2,048, at 12 us for a step and 4 us for a message:
//
//   levels       1      2      3      4      5      6
//   first     2048     45     11      6      4      2
//   m                  45     13      6      4      3
//   us       8,204    384    184    144    140    140
//
// (For 3 levels: the rank sends to 11 relays, these to 13 more each, so 11 x 14 = 154 relays, which send to the 2,048
// ranks.) For each number of levels, m is chosen for the fewest messages. Plans are computed for the numbers of levels
// that are predicted to be fastest. If nodes are known, the last levels may be within nodes, where messages take less
// time.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "search/crossing_cost.h"

namespace shardwright {

// Consecutive crossings and their total cost.
struct OverRelays {
  std::vector<Step> crossings;
  Cost cost;
};

// The numbers of levels of relays to try for the ranks of a layout, from sizes alone.
class RelayShapes {
 public:
  // Relays stand for blocks of the ranks of `many`, which must have no partials. `topology` must outlive the object.
  RelayShapes(const Layout& many, const Topology& topology);

  // Numbers of crossings. Crossings within nodes come last; the other crossings are between nodes, or between any ranks
  // if nodes are not known.
  struct Shape {
    int64_t picoseconds = 0;    // estimated time of all crossings
    int64_t levels = 2;         // number of crossings between nodes, or between any ranks
    int64_t levels_inside = 0;  // number of crossings within nodes
    auto operator<=>(const Shape&) const = default;
  };

  // Returns shapes, at least one, the fastest first. `few` is the number of ranks that send at the same time in the
  // first crossing (or receive in the last), above 0.
  std::vector<Shape> all(int64_t few) const;
  // Returns the number of ranks of the layout that hold elements; at least 1.
  int64_t members() const { return members_; }

 private:
  int64_t time(const Shape& shape, int64_t few) const;  // estimated picoseconds of all crossings

  const Topology& topology_;
  int64_t parts_ = 1;    // number of different parts that are not empty
  int64_t members_ = 1;  // number of ranks that hold elements
  int64_t bytes_ = 0;    // size of the largest part
};

// Returns the cheapest crossings from `from` to `to` over relays that were found. Relays stand for ranks of `to` if
// `fans_out`, else for ranks of `from`. Returns nullopt if there are no relays, if all of them would hold more than
// options.max_held, or if is_worth is false for the cost of all crossings found. `is_worth(cost)` must be true exactly
// for costs below some limit. The layouts must have no partials.
std::optional<OverRelays> cheapest_over_relays(const Layout& from, const Layout& to, bool fans_out,
                                               const PlanOptions& options, const Topology& topology,
                                               const std::function<bool(const Cost&)>& is_worth);

}  // namespace shardwright
