// From a layout on one mesh to a layout on another: who sends what to whom, in one move over the union of their ranks.
//
// The meshes may have any ranks: others, some, or all in common, in any shape and order. The ranks that hold a part of
// the source are its *holders*. A rank of the destination that needs something of a part which it does not hold itself
// is a *needer* of the part. What a rank holds already stays where it is and is no parcel. So every element that a rank
// needs comes from exactly one place.
//
// The holders of a part share the sending. Its needers stand in line: one replica of the destination after the other,
// each in the order of its parts, and each rank with what it needs. Every holder serves a stretch of the line. All
// stretches have one length, the least that serves the longest line: shorter ones would split more messages and relieve
// no rank that matters. With Sharing::kBytes a stretch ends anywhere, and the worst rank sends the least that it can
// without forwarding, rounded up to elements. With Sharing::kMessages the holder whose stretch has the middle of a
// message sends all of it, and the worst rank sends less than one message more.
//
// 12 rows, from ranks 0 to 3 on (a=2, b=2) as [S(0), R] to ranks 4 to 6 on (c=3) as [S(0)], by Sharing::kBytes:
//
//   part      holders    in line                          stretches of 3 rows
//   [0, 6)    0, 1       4: [0, 4)    5: [4, 6)           0 -> 4: [0, 3)    1 -> 4: [3, 4)    1 -> 5: [4, 6)
//   [6, 12)   2, 3       5: [6, 8)    6: [8, 12)          2 -> 5: [6, 8)    2 -> 6: [8, 9)    3 -> 6: [9, 12)
//
// All of it depends on the two layouts alone and is the same on all ranks. Nothing here costs ranks times ranks: places
// in line are worked out tensor dim by tensor dim, and what one rank sends or receives takes as long as it has parcels.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cost/cost.h"
#include "crossing/grid.h"
#include "crossing/sharing.h"
#include "layout/layout.h"
#include "layout/rank.h"

namespace shardwright {

class Crossing {
 public:
  // Layouts of one shape and dtype without partials, and kMessages or kBytes; else throws InvariantError.
  Crossing(const Layout& src, const Layout& dst, Sharing sharing);

  // Those of either mesh, ascending. Other ranks send and receive nothing.
  const std::vector<Rank>& ranks() const { return ranks_; }

  // What goes between two ranks: a range of the intersection of what the sender holds and the receiver needs, in packed
  // order, which is that of its runs (intersect() in layout/region.h), the last tensor dim fastest.
  struct Parcel {
    Rank peer{};
    Interval range;
    bool operator==(const Parcel&) const = default;
  };

  // By ascending peer, at most one per peer, none of them empty.
  std::vector<Parcel> sends(Rank rank) const;
  std::vector<Parcel> receives(Rank rank) const;

  // `messages` counts each parcel as many times as there are rounds, or as it has elements.
  Traffic at(Rank rank, int64_t rounds = 1) const;

  // What a rank needs and does not hold, and what it sends. Neither takes a walk over its peers.
  int64_t received_elements(Rank rank) const;
  int64_t sent_elements(Rank rank) const;

  // What the worst rank does, each figure by itself, and what all ranks receive together.
  struct Totals {
    StepFigures worst;
    int64_t received_bytes_sum = 0;
  };
  Totals totals(int64_t rounds = 1) const;
  // What totals().worst is no less than, without a walk over parcels. Of kMessages only what is sent may be more, of
  // kBytes only the messages.
  StepFigures worst_at_least() const;

  // Whether some parcel goes from one node to another, with nodes of so many consecutive ranks; never with 0.
  bool crosses_nodes(int64_t ranks_per_node) const;

 private:
  // A needer's place in a line. A rank that holds the part itself keeps its place, without elements.
  struct Place {
    int64_t begin = 0;  // elements before it
    int64_t elements = 0;
  };
  struct Absent {
    int64_t place = 0;     // its number in the line
    int64_t elements = 0;  // that it would have
    int64_t before = 0;    // that absent ones before it would have
  };
  // The line of one part of the source.
  struct Line {
    std::vector<int64_t> slots;  // of the part
    int64_t places = 1;          // for each replica of the destination
    int64_t elements = 1;        // of each replica, if none of its ranks held the part
    std::span<const Absent> absent;
  };

  void find_absent();
  Line line_of(std::vector<int64_t> slots) const;
  int64_t num_places(const Line& line) const { return line.places * dst_.replicas(); }
  int64_t length(const Line& line) const;
  Place place(const Line& line, int64_t number) const;
  // The number of the first place that holders serve whose turn is this or later.
  int64_t first_served(const Line& line, int64_t turn) const;
  // What the holder whose turn it is sends to a place.
  Interval served(const Place& place, int64_t turn) const;
  Rank needer(const Line& line, int64_t number) const;
  int64_t parts_received(Rank rank) const;
  int64_t largest_result_bytes() const;
  // Calls visit(slots of the part, turn of the holder, range).
  template <typename Visit>
  void for_each_received(Rank rank, const Visit& visit) const;

  Sharing sharing_;
  int64_t item_bytes_;
  Grid src_;
  Grid dst_;
  std::vector<SlotMeetings> meetings_;  // by tensor dim
  std::vector<Rank> ranks_;
  std::vector<std::vector<Absent>> absent_;  // by part of the source, each by place
  int64_t stretch_ = 1;                      // elements
};

}  // namespace shardwright
