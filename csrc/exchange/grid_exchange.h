// The exchange of layouts that are partitions: each tensor dim is cut into parts that share nothing.
//
// The meshes may have no ranks, some or all in common, and any shapes and orders. The ranks that hold a part of the
// source are its *holders*. A rank of the destination that needs elements of a part which it does not hold itself is a
// *needer* of the part.
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
// With Sharing::kNodes a line is divided by the nodes of its needers (exchange/node_sharing.h): holders serve their own
// node first, each up to kMostInside times the longest stretch, and the rest is divided evenly.
//
// Except for kNodes, which lists all messages, no function takes time proportional to ranks times ranks: places in a
// line are computed tensor dim by tensor dim, and the messages of one rank take time in proportion to their number.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/grid.h"
#include "exchange/sharing.h"
#include "layout/layout.h"
#include "layout/rank.h"

namespace shardwright {

class GridExchange final : public Exchange {
 public:
  // The layouts must have the same shape and dtype and no partials, and `sharing` must not be kNone. With kNodes, nodes
  // are `ranks_per_node` consecutive ranks. Otherwise throws InvariantError.
  GridExchange(const Layout& src, const Layout& dst, Sharing sharing, int64_t ranks_per_node = 0);
  // The same of grids with equal dims, which may be boxes of tensors with other shapes. The holder with number
  // `first_turn` among a part's replicas serves the first stretch, and after the last one the first follows.
  GridExchange(Grid src, Grid dst, int64_t item_bytes, Sharing sharing, int64_t first_turn = 0,
               int64_t ranks_per_node = 0);

  // Returns the same crossing with other sharing. What does not depend on that is made once for both.
  GridExchange shared_by(Sharing sharing, int64_t ranks_per_node = 0) const;

  Sharing sharing() const { return sharing_; }

  // Within its node a holder sends at most so many times the longest stretch.
  static constexpr int64_t kMostInside = 4;

  const Grid& src() const { return all_->src; }
  const Grid& dst() const { return all_->dst; }
  const Grid& grid(Direction side) const { return side == Direction::kSend ? src() : dst(); }

  const std::vector<Rank>& ranks() const override { return all_->ranks; }
  bool communicates() const override;
  bool crosses_nodes(int64_t ranks_per_node) const override;
  int64_t num_elements(Rank rank, Direction direction) const override;
  int64_t messages_at_most(Rank rank, Direction direction) const override;  // what is sent is exact
  int64_t needed_by_all() const override;
  Traffic traffic(Rank rank, int64_t rounds = 1) const override;
  StepFigures worst(int64_t rounds = 1) const override { return totals(rounds).worst; }
  std::vector<MessageSize> message_sizes(Rank rank, Direction direction) const override;
  std::vector<Message> messages(Rank rank, Direction direction) const override;
  std::optional<Region> region(Rank rank, Direction side) const override;
  std::vector<LocalAxis> local_axes(Rank rank, Direction side) const override;
  std::optional<std::map<std::vector<Rank>, int64_t>> demand() const override;

  // A message as a range of what the sender's and the receiver's parts have in common. These elements are numbered in
  // the order of their runs (intersect() in layout/region.h), the last tensor dim fastest.
  struct PeerRange {
    Rank peer{};
    Interval range;
    bool operator==(const PeerRange&) const = default;
  };
  // By ascending peer, one per peer, none empty.
  std::vector<PeerRange> ranges(Rank rank, Direction direction) const;

  // The most that a holder sends.
  int64_t longest_stretch() const { return all_->stretch; }

  // Returns a number of messages that all ranks together exchange at least where every holder serves whole messages.
  int64_t num_meetings() const;

  // The part of a rank's traffic that stays within its node, in bytes. With Sharing::kNodes alone.
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
  // A lower bound of totals().worst, without a walk over messages: messages sent are left out, of kMessages what is
  // sent may be more, and of kBytes the messages.
  StepFigures worst_at_least() const;

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
  // The parts that a rank holds and needs; null if it is not on that mesh.
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

  GridExchange(std::shared_ptr<const Parties> all, int64_t item_bytes, Sharing sharing, int64_t first_turn,
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
  // The figures of a rank that need no walk over its peers.
  struct Sent {
    int64_t elements = 0;
    int64_t messages = 0;
  };
  Sent sent(Rank rank, const Ends& ends) const;
  int64_t received_elements(const Ends& ends) const;
  int64_t parts_received(const Ends& ends) const;
  Traffic traffic(Rank rank, const Ends& ends, int64_t rounds) const;
  // Calls visit(holder, range).
  template <typename Visit>
  void for_each_received(Rank rank, const Ends& ends, const Visit& visit) const;
  // With Sharing::kNodes.
  using Ranges = std::map<Rank, std::vector<PeerRange>>;
  static const std::vector<PeerRange>& listed(const Ranges& ranges, Rank rank);

  std::shared_ptr<const Parties> all_;
  Sharing sharing_;
  int64_t first_turn_ = 0;
  // With Sharing::kNodes.
  int64_t ranks_per_node_ = 0;
  Ranges sends_;
  Ranges receives_;
};

}  // namespace shardwright
