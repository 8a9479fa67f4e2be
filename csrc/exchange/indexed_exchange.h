// The exchange of layouts in which an element may be stored on several coordinates of a mesh dim, or parts are in any
// order, or only one side flattens the leading tensor dims. Both sides are parts of one grid of axes. exchange/axes.h
// defines axis, axis shard and candidate sender.
//
// With ReplicaPolicy::kWholeMessages, an element that several shards have, or a part that several ranks hold, is sent
// by the nearest rank: the rank whose number shares the longest binary prefix with the receiver's number. If the ranks
// per node are a power of two, ranks on the receiver's node are nearest. Of equally near ranks, the rank that sends
// least so far is chosen. With ReplicaPolicy::kEvenBytes distance does not count, and elements with several candidate
// senders are divided so that these send as equally as possible.
//
// Example: 12 rows. Rank 0 holds rows 6 to 11 and then 0 to 5, rank 1 holds all rows in order, and ranks 4 to 6 need
// them as S(0).
//
//   kWholeMessages    0 -> 4: rows 0 to 3    1 -> 5: rows 4 to 7    0 -> 6: rows 8 to 11
//   kEvenBytes        ranks 0 and 1 each send 2 rows to each of ranks 4, 5 and 6
//
// The received bytes are the least possible. With ReplicaPolicy::kEvenBytes, the busiest rank sends at most 5% more
// than the least possible (or than the most that a rank receives, if that is more). First, each axis is divided as if
// it were the only one, and requests with the fewest candidate senders are divided first. If the busiest rank sends too
// much, an exact flow over cells (exchange/cells.h) divides all axes together. With too many cells the first division
// stays.
//
// Takes time and memory in proportion to the pairs of ranks that exchange data, and to the intervals that lists have in
// samples of their repetitions (exchange/samples.h).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "exchange/axes.h"
#include "exchange/exchange.h"
#include "exchange/replica_policy.h"
#include "layout/layout.h"

namespace shardwright {

class IndexedExchange final : public Exchange {
 public:
  // The layouts must describe the same tensor. On one mesh, the pending reductions must be equal on both sides; between
  // two meshes there must be none. `policy` must be kWholeMessages or kEvenBytes. Throws InvariantError on other
  // layouts and on kAligned. Throws UserError if a flattened part has more than CutRule::kMaxRuns runs (a repeating
  // block counts once), or if all parts together have more than 2^24 runs on an axis. Only runs in samples count for
  // this limit if all parts of the axis ascend.
  IndexedExchange(const Layout& src, const Layout& dst, ReplicaPolicy policy);

  // Makes the exchange of two grids with equally many axes, where every element of the destination is on some shard of
  // the source. Throws InvariantError if the numbers of axes differ, and on kAligned; throws UserError on the limit of
  // 2^24 runs.
  IndexedExchange(AxisGrids grids, int64_t item_bytes, ReplicaPolicy policy);

  const std::vector<Rank>& ranks() const override { return ranks_; }
  bool communicates() const override { return !message_ranges_.empty(); }
  int64_t total_needed_elements() const override;  // with an index map, counts only elements that the map moves
  std::vector<MessageSize> message_sizes(Rank rank, Direction direction) const override;
  std::vector<Message> messages(Rank rank, Direction direction) const override;
  std::optional<Region> region(Rank rank, Direction side) const override;
  std::vector<LocalAxis> local_axes(Rank rank, Direction side) const override;  // only with an index map
  std::optional<std::map<std::vector<Rank>, int64_t>> demand() const override;

 private:
  // Elements of an axis that a receiver gets from one shard of the source; after compute_messages_by_cells(), the
  // elements of one class.
  struct Share {
    int64_t shard = 0;      // index of the axis shard, or of the class
    IntervalList elements;  // ascending
  };
  using Shares = std::vector<Share>;  // by ascending shard
  // A message, or a part of a message: a range of the elements of a combination of shares, in the receiver's order.
  struct MessageRange {
    int64_t from = 0;         // position of the sender on the source's mesh
    int64_t to = 0;           // position of the receiver on the destination's mesh
    int64_t combination = 0;  // index of the combination of shares, the last axis fastest
    Interval range;
  };
  class AxisShares;

  // Returns the shares of an axis for the receiver at position `to`, including elements that it keeps.
  const Shares& shares_of(size_t axis, int64_t to) const { return shares_[axis].at(to); }
  // Returns the elements of a message's combination of shares, by axis. The message's range is a part of them.
  Region elements_of(const MessageRange& message) const;
  using Indices = std::map<Rank, std::vector<size_t>>;  // indices in message_ranges_
  // Returns the message ranges that a rank sends or receives, as indices in message_ranges_, by ascending peer.
  const std::vector<size_t>& message_ranges_of(Rank rank, Direction direction) const;
  Rank sender(const MessageRange& message) const { return src_.mesh->rank_at(Position{message.from}); }
  Rank receiver(const MessageRange& message) const { return dst_.mesh->rank_at(Position{message.to}); }
  // Computes the messages from the shares of each axis.
  void compute_messages();
  // Replaces the messages by those of an exact flow over cells, if the busiest rank sends too much.
  void compute_messages_by_cells();
  void index_message_ranges();  // fills sent_by_ and received_by_
  // Divides the requested elements of one part of the source among its candidate senders, which are given by position,
  // and appends the messages. `requests` are messages without senders. `sent` has the number of elements that each
  // position sends so far. It is updated, and only used with whole messages.
  void divide_among(const std::vector<int64_t>& senders, std::vector<MessageRange> requests,
                    std::vector<int64_t>& sent);

  ReplicaPolicy policy_;
  AxisGrid src_;
  AxisGrid dst_;
  std::vector<Rank> ranks_;
  std::vector<std::map<int64_t, Shares>> shares_;  // by axis and position of the receiver
  std::vector<MessageRange> message_ranges_;
  Indices sent_by_;      // by sender, each by ascending receiver
  Indices received_by_;  // by receiver, each by ascending sender
};

}  // namespace shardwright
