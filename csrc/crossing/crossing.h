// One move from a layout on one mesh to a layout on another: who sends what to whom, among the ranks of both meshes.
//
// The meshes may have no ranks, some or all in common, and any shapes and orders. The ranks that hold a part of the
// source are its *holders*. A rank of the destination that needs data of a part which it does not hold itself is a
// *needer* of the part. Data that a rank already holds stays on it and is not sent. So every element that a rank needs
// comes from exactly one place.
//
// The holders of a part share the sending. The data that its needers need is arranged in a *line*: one replica of the
// destination after the other, each in the order of its parts. Every holder sends one stretch of the line, the holders
// in mesh order. Stretches may be as long as the shortest with which the longest line is sent: shorter ones would split
// more messages without relieving the busiest rank. A line whose holders can take whole replicas of the destination
// within that length is cut between replicas. With Sharing::kBytes a stretch may end anywhere, and the worst rank sends
// the least possible without forwarding, rounded up to elements. With Sharing::kMessages the holder whose stretch has
// the middle of a message sends the whole message, and the worst rank sends less than one message more.
//
// 12 rows, from ranks 0 to 3 on (a=2, b=2) as [S(0), R] to ranks 4 to 6 on (c=3) as [S(0)], by Sharing::kBytes:
//
//   part      holders    line                             stretches of 3 rows
//   [0, 6)    0, 1       4: [0, 4)    5: [4, 6)           0 -> 4: [0, 3)    1 -> 4: [3, 4)    1 -> 5: [4, 6)
//   [6, 12)   2, 3       5: [6, 8)    6: [8, 12)          2 -> 5: [6, 8)    2 -> 6: [8, 9)    3 -> 6: [9, 12)
//
// With Sharing::kNodes a line is divided by the nodes of its needers (crossing/node_sharing.h): holders serve their own
// node first, each up to kMostInside times the longest stretch, and the rest is divided evenly.
//
// The result depends only on the two layouts and is the same on all ranks. Except for kNodes, which lists all parcels,
// no function takes time proportional to ranks
// times ranks: places in a line are computed tensor dim by tensor dim, and the sends or receives of one rank take time
// in proportion to its parcels.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
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
  // The layouts must have the same shape and dtype and no partials, and `sharing` must not be kNone. With kNodes, nodes
  // are `ranks_per_node` consecutive ranks. Otherwise throws InvariantError.
  Crossing(const Layout& src, const Layout& dst, Sharing sharing, int64_t ranks_per_node = 0);
  // The same of grids with equal dims, which may be boxes of tensors with other shapes. The holder with number
  // `first_turn` among a part's replicas serves the first stretch, and after the last one the first follows.
  Crossing(Grid src, Grid dst, int64_t item_bytes, Sharing sharing, int64_t first_turn = 0, int64_t ranks_per_node = 0);

  // Returns the same crossing with other sharing. What does not depend on that is made once for both.
  Crossing shared_by(Sharing sharing, int64_t ranks_per_node = 0) const;

  Sharing sharing() const { return sharing_; }

  // Within its node a holder sends at most so many times the longest stretch.
  static constexpr int64_t kMostInside = 4;

  const Grid& src() const { return all_->src; }
  const Grid& dst() const { return all_->dst; }

  // The ranks of both meshes, ascending. Other ranks send and receive nothing.
  const std::vector<Rank>& ranks() const { return all_->ranks; }

  // What one rank sends another: a range of the intersection of the sender's and the receiver's parts. The elements of
  // the intersection are numbered in the order of its runs (intersect() in layout/region.h), the last tensor dim
  // fastest.
  struct Parcel {
    Rank peer{};
    Interval range;
    bool operator==(const Parcel&) const = default;
  };

  // Return parcels by ascending peer, at most one per peer, and none empty.
  std::vector<Parcel> sends(Rank rank) const;
  std::vector<Parcel> receives(Rank rank) const;

  // In messages, a parcel counts once per round, but at most once per element.
  Traffic at(Rank rank, int64_t rounds = 1) const;

  // Return how much a rank needs and does not hold, and how much it sends, without a walk over its peers.
  int64_t received_elements(Rank rank) const;
  int64_t sent_elements(Rank rank) const;
  // Return how many parcels a rank sends, and a number that it receives at most, also without a walk.
  int64_t parcels_sent(Rank rank) const;
  int64_t parcels_received_at_most(Rank rank) const;

  // The most that a holder sends.
  int64_t longest_stretch() const { return all_->stretch; }
  // Returns what all needers of a part of the source together need, by its number in src().
  int64_t wanted_elements(int64_t part) const { return all_->lines[part].length; }

  // Returns whether some rank receives something.
  bool communicates() const;
  // Returns a number of parcels that all ranks together exchange at least where every holder serves whole messages.
  int64_t num_meetings() const;

  // What of a rank's traffic stays within its node, in bytes. With Sharing::kNodes alone.
  struct Inside {
    int64_t received_bytes = 0;
    int64_t sent_bytes = 0;
  };
  Inside inside(Rank rank) const;

  // The largest value of each figure over all ranks, and what all ranks receive together.
  struct Totals {
    StepFigures worst;
    int64_t received_bytes_sum = 0;
  };
  Totals totals(int64_t rounds = 1) const;
  // What totals().worst is no less than, without a walk over parcels: messages sent are left out, of kMessages what is
  // sent may be more, and of kBytes the messages.
  StepFigures worst_at_least() const;

  // Returns whether some parcel goes from one node to another. A node is `ranks_per_node` consecutive ranks; with 0
  // there is only one node.
  bool crosses_nodes(int64_t ranks_per_node) const;

 private:
  // A rank's place in a line. A rank that holds the part itself has a place without elements.
  struct Place {
    int64_t begin = 0;  // the number of elements before it in the line
    int64_t elements = 0;
  };
  // A place without elements, because its rank holds the part itself.
  struct Absent {
    int64_t place = 0;     // its number in the line
    int64_t elements = 0;  // that it would have otherwise
    int64_t before = 0;    // elements that the absent places before it would have
  };
  // The line of one part of the source.
  struct Line {
    int64_t part = 0;
    int64_t places = 1;    // the number of places per replica of the destination
    int64_t elements = 1;  // elements per replica if nothing is absent
    int64_t length = 0;    // elements of all that are not absent
    int64_t stretch = 1;   // elements
  };
  // What a rank holds and what it needs; null where it is not on that mesh.
  struct Ends {
    std::optional<Grid::Seat> holds;
    std::optional<Grid::Seat> needs;
  };
  // Everything that does not depend on sharing.
  struct Parties {
    Parties(Grid from, Grid to);
    void find_absent();
    void find_lines();

    Grid src;
    Grid dst;
    std::vector<SlotMeetings> meetings;  // by tensor dim
    std::vector<Rank> ranks;
    std::vector<Ends> ends;                   // by index in ranks
    std::vector<std::vector<Absent>> absent;  // by part of the source, each by place
    std::vector<Line> lines;                  // by part of the source
    int64_t stretch = 1;                      // elements, at most
    int64_t least_stretch = 1;                // elements, of any line with absent ranks
  };

  Crossing(std::shared_ptr<const Parties> all, int64_t item_bytes, Sharing sharing, int64_t first_turn,
           int64_t ranks_per_node);
  void share_among_nodes();
  const Ends& ends_of(Rank rank) const;
  int64_t num_places(const Line& line) const { return line.places * all_->dst.replicas(); }
  Place place(const Line& line, int64_t number) const;
  // Returns the number of the first place that is served by a holder with this turn or a later one.
  int64_t first_served(const Line& line, int64_t turn) const;
  // Returns the number of the place after the last one that is served by the holder with this turn.
  int64_t end_served(const Line& line, int64_t turn) const;
  // Returns how many of the places [first, end) have elements.
  int64_t num_present(const Line& line, int64_t first, int64_t end) const;
  // Returns what the holder with this turn sends to a place.
  Interval served(const Line& line, const Place& place, int64_t turn) const;
  Rank needer(const Line& line, int64_t number) const;
  Rank holder(const Line& line, int64_t turn) const;
  int64_t turn_of(const Grid::Seat& seat) const;
  int64_t largest_result_bytes() const;
  // What is known of a rank without a walk over its peers.
  struct Sent {
    int64_t elements = 0;
    int64_t parcels = 0;
  };
  Sent sent(Rank rank, const Ends& ends) const;
  int64_t received_elements(const Ends& ends) const;
  int64_t parts_received(const Ends& ends) const;
  Traffic at(Rank rank, const Ends& ends, int64_t rounds) const;
  // Calls visit(holder, range).
  template <typename Visit>
  void for_each_received(Rank rank, const Ends& ends, const Visit& visit) const;
  // With Sharing::kNodes.
  using Parcels = std::map<Rank, std::vector<Parcel>>;
  static const std::vector<Parcel>& listed(const Parcels& parcels, Rank rank);

  std::shared_ptr<const Parties> all_;
  int64_t item_bytes_;
  Sharing sharing_;
  int64_t first_turn_ = 0;
  // With Sharing::kNodes.
  int64_t ranks_per_node_ = 0;
  Parcels sends_;
  Parcels receives_;
};

}  // namespace shardwright
