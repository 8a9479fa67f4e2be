// One move between layouts where an element may lie on several coordinates of a mesh dim, or parts are ordered
// otherwise, or the leading tensor dims are flattened on one side only: who sends what to whom, on one mesh or between
// two.
//
// Both sides are seen as parts of one grid of *axes*. A tensor dim is an axis; tensor dims that one side flattens are
// one axis of all their elements on both sides; and a mesh dim whose reduction is due before and after is an axis that
// this mesh dim cuts, because each of its coordinates has a tensor of its own. A *slot* of an axis is one combination
// of coordinates on the mesh dims that cut it, and has the list of elements that they hold, in local order. A part is
// one slot of each axis; its *holders* are the ranks that have these slots.
//
// Invariants:
//   - What a rank needs and holds already, it keeps. Axis by axis, its own slot serves every element that it has; so
//   what
//     its own slots serve together is exactly what its part before shares with its part after.
//   - Every other element of an axis is served by one slot that has it. So each element that a rank needs comes from
//     exactly one place, and what one rank sends another is a product of lists.
//   - The choice depends only on the two layouts, so all ranks make the same.
//
// With Sharing::kMessages, an element that several slots have, or a part that several ranks hold, comes from the
// nearest: the rank whose number differs from the receiver's in the lowest bits only, which on nodes of a power of two
// of ranks prefers the own node. Among those equally near, from the one that sends least so far. With Sharing::kBytes
// nearness does not count, and what several have is divided so that they send as equally as possible.
//
// Bytes received are the least possible. Bytes sent by the busiest rank are not: requests with the fewest servers are
// served first, one after the other, which need not find the best division.
//
// Takes time and memory in proportion to the pairs of ranks that exchange something, and to what lists have in samples
// of their repetitions (crossing/samples.h).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "cost/cost.h"
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

  struct Axis {
    std::vector<int> mesh_dims;       // that cut it, the first cut first
    std::vector<IntervalList> lists;  // by slot
  };
  struct Side {
    MeshPtr mesh;
    std::vector<Axis> axes;
    std::vector<std::vector<int64_t>> slots;  // by position and axis
  };
  // The same of any two sides with as many axes, of which each source element is on some slot.
  Rearrangement(Side src, Side dst, int64_t item_bytes, Sharing sharing);

  // The ranks of both meshes, ascending.
  const std::vector<Rank>& ranks() const { return ranks_; }

  // What one rank sends another: a range of `elements`, numbered in the order in which the receiver has them, the last
  // axis fastest.
  struct Parcel {
    Rank peer{};
    Region elements;  // by axis, ascending
    Interval range;
  };
  // Return parcels by ascending peer, none empty.
  std::vector<Parcel> sends(Rank rank) const;
  std::vector<Parcel> receives(Rank rank) const;

  // What a rank has before and after, by axis; it must be on the mesh. The local tensor is their row-major product.
  Region held(Rank rank) const { return region(src_, *src_.mesh->position_of(rank)); }
  Region needed(Rank rank) const { return region(dst_, *dst_.mesh->position_of(rank)); }

  // Returns whether any rank receives anything.
  bool communicates() const { return !deliveries_.empty(); }
  int64_t received_elements(Rank rank) const;
  int64_t sent_elements(Rank rank) const;
  int64_t parcels_received(Rank rank) const;
  int64_t parcels_sent(Rank rank) const;
  // In messages, a parcel counts once per round, but at most once per element.
  Traffic at(Rank rank, int64_t rounds = 1) const;
  StepFigures worst(int64_t rounds = 1) const;
  // Returns whether some parcel goes from one node to another. A node is `ranks_per_node` consecutive ranks; with 0
  // there is only one node.
  bool crosses_nodes(int64_t ranks_per_node) const;

 private:
  // Elements of an axis that one slot of the source serves.
  struct Share {
    int64_t slot = 0;
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

  static Side side_of(const Layout& layout, MeshDimSet kept, int flattened);
  static Region region(const Side& side, int64_t position);
  const Shares& shares_of(size_t axis, int64_t to) const;
  Region elements_of(const Delivery& delivery) const;
  void deliver();
  void divide_among(const std::vector<int64_t>& holders, std::vector<Delivery> wanted, std::vector<int64_t>& sent);

  Sharing sharing_;
  int64_t item_bytes_;
  Side src_;
  Side dst_;
  std::vector<Rank> ranks_;
  std::vector<std::map<int64_t, Shares>> shares_;  // by axis, by position of the receiver
  std::vector<Delivery> deliveries_;
  std::map<Rank, std::vector<size_t>> sent_by_;  // deliveries, by ascending peer
  std::map<Rank, std::vector<size_t>> received_by_;
};

}  // namespace shardwright
