// The exchange of layouts where an element may lie on several coordinates of a mesh dim, parts are ordered otherwise,
// or the leading tensor dims are flattened on one side only. Both sides are seen as parts of one grid of axes
// (exchange/axes.h).
//
// With Sharing::kMessages, an element that several slots have, or a part that several ranks hold, comes from the
// nearest: the rank whose number differs from the receiver's in the lowest bits only, which on nodes of a power of two
// of ranks prefers the own node. Among those equally near, from the one that sends least so far. With Sharing::kBytes
// nearness does not count, and what several have is divided so that they send as equally as possible.
//
// Bytes received are the least possible. With Sharing::kBytes, bytes sent by the busiest rank are within a twentieth of
// the least (or of what some rank receives, if that is more): first, each axis is divided as if it were alone, requests
// with the fewest servers first; if that is too much, an exact flow over cells (exchange/cells.h) divides all axes
// together. Only where there are too many cells does the first division stay.
//
// Takes time and memory in proportion to the pairs of ranks that exchange something, and to what lists have in samples
// of their repetitions (exchange/samples.h).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "exchange/axes.h"
#include "exchange/exchange.h"
#include "exchange/sharing.h"
#include "layout/layout.h"

namespace shardwright {

class IndexedExchange final : public Exchange {
 public:
  // The layouts must be of one tensor. On one mesh, reductions that are due must be the same on both sides; between two
  // there must be none. Otherwise throws InvariantError. Throws UserError if a part that is flattened keeps more than
  // CutRule::kMaxRuns runs (what repeats is kept once), or if all parts have more than 2^24 runs of an axis in samples,
  // or altogether where parts of the axis do not ascend.
  IndexedExchange(const Layout& src, const Layout& dst, Sharing sharing);

  // The same of any two grids with as many axes, where every element of the destination is on some slot of the source.
  IndexedExchange(AxisGrids grids, int64_t item_bytes, Sharing sharing);

  const std::vector<Rank>& ranks() const override { return ranks_; }
  bool communicates() const override { return !deliveries_.empty(); }
  int64_t needed_by_all() const override;  // of what may move
  std::vector<MessageSize> message_sizes(Rank rank, Direction direction) const override;
  std::vector<Message> messages(Rank rank, Direction direction) const override;
  std::optional<Region> region(Rank rank, Direction side) const override;
  std::vector<LocalAxis> local_axes(Rank rank, Direction side) const override;  // only with a map
  std::optional<std::map<std::vector<Rank>, int64_t>> demand() const override;

 private:
  // Elements of an axis that one slot of the source serves; with cells, those of one class.
  struct Share {
    int64_t slot = 0;       // or class
    IntervalList elements;  // ascending
  };
  using Shares = std::vector<Share>;  // by ascending slot
  // A message, or a part of one: a range of the elements of all shares, in the order in which the receiver has them.
  struct Delivery {
    int64_t from = 0;  // positions
    int64_t to = 0;
    int64_t number = 0;  // of the combination of shares, the last axis fastest
    Interval range;
  };
  class Choice;

  const Shares& shares_of(size_t axis, int64_t to) const;
  Region elements_of(const Delivery& delivery) const;
  using Numbers = std::map<Rank, std::vector<size_t>>;  // of deliveries
  const std::vector<size_t>& deliveries_of(Rank rank, Direction direction) const;
  Rank sender(const Delivery& delivery) const { return src_.mesh->rank_at(Position{delivery.from}); }
  Rank receiver(const Delivery& delivery) const { return dst_.mesh->rank_at(Position{delivery.to}); }
  void deliver();
  void deliver_by_cells();
  void index_deliveries();
  void divide_among(const std::vector<int64_t>& holders, std::vector<Delivery> wanted, std::vector<int64_t>& sent);

  Sharing sharing_;
  AxisGrid src_;
  AxisGrid dst_;
  std::vector<Rank> ranks_;
  std::vector<std::map<int64_t, Shares>> shares_;  // by axis, by position of the receiver
  std::vector<Delivery> deliveries_;
  Numbers sent_by_;  // by ascending peer
  Numbers received_by_;
};

}  // namespace shardwright
