// One move between layouts where an element may lie on several coordinates of a mesh dim, or parts are ordered
// otherwise, or the leading tensor dims are flattened on one side only: who sends what to whom, on one mesh or between
// two.
//
// Both sides are seen as parts of one grid of axes (crossing/axes.h).
//
// Invariants:
//   - What a rank needs and holds already, it keeps: exactly what its part before shares with its part after.
//   - Every other element comes from exactly one place.
//   - The choice depends only on the two layouts, so all ranks make the same.
//
// With Sharing::kMessages, an element that several slots have, or a part that several ranks hold, comes from the
// nearest: the rank whose number differs from the receiver's in the lowest bits only, which on nodes of a power of two
// of ranks prefers the own node. Among those equally near, from the one that sends least so far. With Sharing::kBytes
// nearness does not count, and what several have is divided so that they send as equally as possible.
//
// Bytes received are the least possible. With Sharing::kBytes, bytes sent by the busiest rank are within a twentieth of
// the least (or of what some rank receives, if that is more): first, each axis is divided as if it were alone, requests
// with the fewest servers first; if that is too much, an exact flow over cells (crossing/cells.h) divides all axes
// together. Only where there are too many cells does the first division stay.
//
// Takes time and memory in proportion to the pairs of ranks that exchange something, and to what lists have in samples
// of their repetitions (crossing/samples.h).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "cost/cost.h"
#include "crossing/axes.h"
#include "crossing/sharing.h"
#include "layout/layout.h"

namespace shardwright {

class Rearrangement {
 public:
  // The layouts must be of one tensor. On one mesh, reductions that are due must be the same on both sides; between two
  // there must be none. Otherwise throws InvariantError. Throws UserError if a part that is flattened keeps more than
  // CutRule::kMaxRuns runs (what repeats is kept once), or if all parts have more than 2^24 runs of an axis in samples,
  // or altogether where parts of the axis do not ascend.
  Rearrangement(const Layout& src, const Layout& dst, Sharing sharing);

  // The same of any two grids with as many axes, where every element of the destination is on some slot of the source.
  Rearrangement(AxisGrids grids, int64_t item_bytes, Sharing sharing);

  // The ranks of both meshes, ascending.
  const std::vector<Rank>& ranks() const { return ranks_; }

  // What one rank sends another: a range of `elements`, numbered in the order in which the receiver has them, the last
  // axis fastest.
  struct Parcel {
    Rank peer{};
    Region elements;  // by axis, ascending
    Interval range;
  };
  // Return parcels by ascending peer, none empty. Those for one peer are one message, in the same order on both sides.
  std::vector<Parcel> sends(Rank rank) const;
  std::vector<Parcel> receives(Rank rank) const;

  // What a rank has before and after, by axis; it must be on the mesh. The local tensor is their row-major product.
  Region held(Rank rank) const { return src_.region(*src_.mesh->position_of(rank)); }
  Region needed(Rank rank) const { return dst_.region(*dst_.mesh->position_of(rank)); }

  // Returns whether any rank receives anything.
  bool communicates() const { return !deliveries_.empty(); }
  int64_t received_elements(Rank rank) const;
  int64_t sent_elements(Rank rank) const;
  // Return how many parcels sends() and receives() have.
  int64_t num_sent(Rank rank) const { return num_deliveries(sent_by_, rank); }
  int64_t num_received(Rank rank) const { return num_deliveries(received_by_, rank); }
  // Return how many elements each message has.
  std::vector<int64_t> messages_received(Rank rank) const;
  std::vector<int64_t> messages_sent(Rank rank) const;
  // A message counts once per round, but at most once per element.
  Traffic at(Rank rank, int64_t rounds = 1) const;
  StepFigures worst(int64_t rounds = 1) const;
  // Returns whether some parcel goes from one node to another. A node is `ranks_per_node` consecutive ranks; with 0
  // there is only one node.
  bool crosses_nodes(int64_t ranks_per_node) const;

 private:
  // Elements of an axis that one slot of the source serves; with cells, those of one class.
  struct Share {
    int64_t slot = 0;       // or class
    IntervalList elements;  // ascending
  };
  using Shares = std::vector<Share>;  // by ascending slot
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
  static int64_t num_deliveries(const Numbers& deliveries, Rank rank);
  std::vector<int64_t> messages(const Numbers& deliveries, Rank rank, int64_t Delivery::* peer) const;
  void deliver();
  void deliver_by_cells();
  void index_deliveries();
  void divide_among(const std::vector<int64_t>& holders, std::vector<Delivery> wanted, std::vector<int64_t>& sent);

  Sharing sharing_;
  int64_t item_bytes_;
  AxisGrid src_;
  AxisGrid dst_;
  std::vector<Rank> ranks_;
  std::vector<std::map<int64_t, Shares>> shares_;  // by axis, by position of the receiver
  std::vector<Delivery> deliveries_;
  Numbers sent_by_;  // by ascending peer
  Numbers received_by_;
};

}  // namespace shardwright
