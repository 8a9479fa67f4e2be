// The exchange of layouts that are partitions: no two parts of a tensor dim have an index in common.
//
// The meshes may have no ranks, some or all in common, and any shapes and orders. The ranks that hold a part of the
// source are its candidate *senders*. A rank of the destination that needs elements of a part and does not hold the
// part is a *receiver* of the part.
//
// The senders of a part share the sending. The elements that its receivers need are arranged in a *queue*: one replica
// of the destination after the other, each in the order of its parts. The elements of one receiver are its *section*
// of the queue. The queue is divided into *ranges* of equal length, one for each sender, in mesh order. The length, the
// queue's *quota*, covers the longest queue of all parts: shorter ranges would split more messages without relieving
// the busiest rank. Exception: if whole replicas of the destination can be divided among the senders so that none sends
// more than this length, the quota is the length of one sender's replicas.
//
// With ReplicaPolicy::kEvenBytes a range may end anywhere, and the busiest rank sends the least possible without
// forwarding, rounded up to elements. With ReplicaPolicy::kWholeMessages a message is sent by the rank whose range
// contains its middle, so the busiest rank sends less than one message more than with kEvenBytes.
//
// Example: 12 rows from ranks 0 to 3 on (a=2, b=2) as [S(0), R] to ranks 4 to 6 on (c=3) as [S(0)], by
// ReplicaPolicy::kEvenBytes:
//
//   part      senders    queue                            ranges of 3 rows
//   [0, 6)    0, 1       4: [0, 4)    5: [4, 6)           0 -> 4: [0, 3)    1 -> 4: [3, 4)    1 -> 5: [4, 6)
//   [6, 12)   2, 3       5: [6, 8)    6: [8, 12)          2 -> 5: [6, 8)    2 -> 6: [8, 9)    3 -> 6: [9, 12)
//
// With ReplicaPolicy::kNodeLocal (exchange/node_local.h) senders first serve receivers on their own node, each up to
// kMaxQuotasWithinNode times the longest range. The rest is divided evenly.
//
// With kNodeLocal all messages are listed. Otherwise no function takes time proportional to ranks times ranks: sections
// of a queue are computed tensor dim by tensor dim, and the messages of one rank take time in proportion to their
// number.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/grid.h"
#include "exchange/replica_policy.h"
#include "layout/layout.h"
#include "layout/rank.h"

namespace shardwright {

class GridExchange final : public Exchange {
 public:
  // The layouts must have the same shape and dtype and no partials, and `policy` must not be kAligned; otherwise throws
  // InvariantError. A node is `ranks_per_node` consecutive ranks. Only kNodeLocal needs this number, and throws
  // InvariantError unless it is above 0.
  GridExchange(const Layout& src, const Layout& dst, ReplicaPolicy policy, int64_t ranks_per_node = 0);
  // Makes the exchange of two grids with equal dims, which may be boxes of tensors with different shapes. The replica
  // `first_sender` of a part, modulo the number of replicas, sends the first range of the queue; the next replicas
  // follow in cyclic order. Throws InvariantError if the numbers of dims differ, and on `policy` as above.
  GridExchange(Grid src, Grid dst, int64_t item_bytes, ReplicaPolicy policy, int64_t first_sender = 0,
               int64_t ranks_per_node = 0);

  // Returns this exchange with another policy, which is checked as in the constructors. Both exchanges share the data
  // that does not depend on the policy.
  GridExchange with_policy(ReplicaPolicy policy, int64_t ranks_per_node = 0) const;

  ReplicaPolicy policy() const { return policy_; }

  // With kNodeLocal a sender sends at most this many times the longest range within its node.
  static constexpr int64_t kMaxQuotasWithinNode = 4;

  const Grid& src() const { return geometry_->src; }
  const Grid& dst() const { return geometry_->dst; }
  const Grid& grid(Direction side) const { return side == Direction::kSend ? src() : dst(); }

  const std::vector<Rank>& ranks() const override { return geometry_->ranks; }
  bool communicates() const override;
  bool crosses_nodes(int64_t ranks_per_node) const override;
  int64_t num_elements(Rank rank, Direction direction) const override;
  int64_t messages_at_most(Rank rank, Direction direction) const override;  // exact for kSend
  int64_t total_needed_elements() const override;
  Traffic traffic(Rank rank, int64_t rounds = 1) const override;
  StepCounts maxima(int64_t rounds = 1) const override { return totals(rounds).maxima; }
  std::vector<MessageSize> message_sizes(Rank rank, Direction direction) const override;
  std::vector<Message> messages(Rank rank, Direction direction) const override;
  std::optional<Region> region(Rank rank, Direction side) const override;
  std::vector<LocalAxis> local_axes(Rank rank, Direction side) const override;
  std::optional<std::map<std::vector<Rank>, int64_t>> demand() const override;

  // A message as a range of the elements that the sender's and the receiver's parts have in common. These elements are
  // numbered in the order of their runs (intersect() in layout/region.h), the last tensor dim fastest.
  struct PeerRange {
    Rank peer{};
    Interval range;
    bool operator==(const PeerRange&) const = default;
  };
  // Returns the messages of a rank by ascending peer, one per peer, none empty.
  std::vector<PeerRange> ranges(Rank rank, Direction direction) const;

  // Returns the length of the longest range, in elements; 1 if nothing is sent. With kEvenBytes the busiest sender
  // sends this many.
  int64_t largest_quota() const { return geometry_->quota; }

  // Returns the number of pairs of a part of the source and a rank that needs some of its elements, even if the rank
  // holds them; at most 2^60. This is an upper bound on the number of messages of all ranks together, unless messages
  // are split.
  int64_t num_overlaps() const;

  // The bytes that a rank exchanges with ranks of its own node. With policies other than kNodeLocal always 0.
  struct NodeTraffic {
    int64_t received_bytes = 0;
    int64_t sent_bytes = 0;
  };
  NodeTraffic within_node(Rank rank) const;

  // The largest value of each count over all ranks, and the bytes that all ranks receive together.
  struct Totals {
    StepCounts maxima;
    int64_t received_bytes_sum = 0;
  };
  Totals totals(int64_t rounds = 1) const;
  // Returns a lower bound on totals().maxima without visiting messages. Sent messages are 0. Sent bytes are exact only
  // with kEvenBytes, received messages only with kWholeMessages; the other counts are exact.
  StepCounts maxima_lower_bound() const;

 private:
  using Overlap = ShardOverlaps::Overlap;

  // A receiver's section of a queue. A rank that holds the part itself is *absent*: its section has no elements.
  struct Section {
    int64_t begin = 0;  // the number of earlier elements in the queue
    int64_t elements = 0;
  };
  // The section of an absent rank.
  struct AbsentSection {
    int64_t index = 0;     // of the section in the queue
    int64_t elements = 0;  // number of elements of the part that the rank needs and holds
    int64_t before = 0;    // sum of `elements` of the earlier absent ranks of the queue
  };
  // The queue of one part of the source.
  struct Queue {
    int64_t part = 0;
    int64_t sections = 1;  // number of sections per replica of the destination
    int64_t elements = 1;  // elements per replica if no rank is absent
    int64_t length = 0;    // elements of the sections of all ranks that are not absent
    int64_t quota = 1;     // elements of a sender's range
  };
  // The parts that a rank holds and needs; nullopt if it is not on that mesh.
  struct RankParts {
    std::optional<Grid::PartReplica> holds;
    std::optional<Grid::PartReplica> needs;
  };
  // All data that does not depend on the policy.
  struct Geometry {
    Geometry(Grid from, Grid to);
    void find_absent();  // fills `absent`
    void find_queues();  // fills `queues`, `quota` and `least_quota`; call after find_absent()

    Grid src;
    Grid dst;
    std::vector<ShardOverlaps> overlaps;  // by tensor dim
    std::vector<Rank> ranks;
    std::vector<RankParts> rank_parts;               // by index in `ranks`
    std::vector<std::vector<AbsentSection>> absent;  // by part of the source, each by index
    std::vector<Queue> queues;                       // by part of the source
    int64_t quota = 1;                               // elements of the longest range
    int64_t least_quota = 1;                         // elements of the shortest range of a queue with absent ranks
  };

  GridExchange(std::shared_ptr<const Geometry> geometry, int64_t item_bytes, ReplicaPolicy policy, int64_t first_sender,
               int64_t ranks_per_node);
  void assign_within_nodes_first();  // with kNodeLocal: fills sends_ and receives_
  // Returns the parts that a rank holds and needs; both nullopt for a rank on neither mesh.
  const RankParts& parts_of(Rank rank) const;
  // Returns the number of sections of a queue, for all replicas of the destination.
  int64_t num_sections(const Queue& queue) const { return queue.sections * geometry_->dst.replicas(); }

  // ---- Queues (grid_queues.cpp)

  // `section_index` is the index of a section in its queue. Sender 0 sends the first range of the queue, sender 1 the
  // second.

  // Returns a section. Section num_sections(queue) begins at the end of the queue and has no elements.
  Section section(const Queue& queue, int64_t section_index) const;
  // Returns the index of the first section that this sender or a later one serves; num_sections(queue) if none.
  int64_t first_served(const Queue& queue, int64_t sender_index) const;
  // Returns one more than the index of the last section that the sender serves; first_served() if it serves none.
  int64_t end_served(const Queue& queue, int64_t sender_index) const;
  // Returns the number of sections in [first, end) that have elements.
  int64_t num_present(const Queue& queue, int64_t first, int64_t end) const;
  // Returns the range of a section's elements that the sender sends.
  Interval served_range(const Queue& queue, const Section& section, int64_t sender_index) const;
  // Return the rank of the receiver of a section, and the rank of a sender.
  Rank receiver(const Queue& queue, int64_t section_index) const;
  Rank sender(const Queue& queue, int64_t sender_index) const;
  // Returns the index of the sender with this replica of the part.
  int64_t sender_index_of(const Grid::PartReplica& part_replica) const;

  // ---- Messages (grid_exchange.cpp)

  int64_t largest_result_bytes() const;  // size of the largest part of the destination
  // The number of elements and of messages that a rank sends.
  struct Sent {
    int64_t elements = 0;
    int64_t messages = 0;
  };
  // In the functions below, `own` is parts_of(rank).
  Sent sent(Rank rank, const RankParts& own) const;
  // Return the number of elements that a rank receives, and the number of parts of the source that have some of them.
  int64_t received_elements(const RankParts& own) const;
  int64_t parts_received(const RankParts& own) const;
  Traffic traffic(Rank rank, const RankParts& own, int64_t rounds) const;
  // Calls visit(sender, range) for each message to a rank. A rank has a section in the queue of each part of the source
  // that overlaps its part of the destination. Each sender whose range has elements of the section sends one message.
  template <typename Visit>
  void for_each_received(Rank rank, const RankParts& own, const Visit& visit) const;
  // The messages of each rank, by ascending peer.
  using MessagesOfRank = std::map<Rank, std::vector<PeerRange>>;
  // Returns the messages of a rank; an empty list if it has none.
  static const std::vector<PeerRange>& messages_in(const MessagesOfRank& messages, Rank rank);

  std::shared_ptr<const Geometry> geometry_;
  ReplicaPolicy policy_;
  int64_t first_sender_ = 0;
  // Only with ReplicaPolicy::kNodeLocal.
  int64_t ranks_per_node_ = 0;
  MessagesOfRank sends_;
  MessagesOfRank receives_;
};

}  // namespace shardwright
