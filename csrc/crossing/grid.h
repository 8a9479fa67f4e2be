// The parts that a layout without partials cuts a tensor into, as a grid over tensor dims, and how two grids meet.
//
// A *slot* is a part of one tensor dim: one combination of coordinates on the mesh dims that cut it. A part of the
// tensor is one slot of each tensor dim. Ranks that differ in other mesh dims are its replicas, numbered in mesh order.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "layout/layout.h"
#include "layout/rank.h"

namespace shardwright {

class Grid {
 public:
  explicit Grid(const Layout& layout);

  int ndim() const { return static_cast<int>(lists_.size()); }
  // What is in each slot of a tensor dim.
  const std::vector<IntervalList>& lists(int tensor_dim) const { return lists_[tensor_dim]; }
  int64_t replicas() const { return replicas_; }
  int64_t parts() const { return mesh_->size() / replicas_; }

  struct Seat {
    std::vector<int64_t> slots;  // by tensor dim
    int64_t replica = 0;
    bool operator==(const Seat&) const = default;
  };
  Seat seat_at(int64_t position) const;
  // Nothing for a rank that is not part of the mesh.
  std::optional<Seat> seat_of(Rank rank) const;
  Rank rank_at(std::span<const int64_t> slots, int64_t replica) const;
  std::vector<Rank> ranks() const { return mesh_->ranks(); }  // by position

  // A number below parts() for each part.
  int64_t index_of(std::span<const int64_t> slots) const;
  std::vector<int64_t> slots_of(int64_t index) const;

 private:
  MeshPtr mesh_;
  std::vector<std::vector<int>> cutting_;  // by tensor dim: mesh dims, first cut first
  std::vector<int> replicating_;           // mesh dims that cut nothing
  int64_t replicas_ = 1;
  std::vector<std::vector<IntervalList>> lists_;
};

// Which slots of two grids have indices in common, on one tensor dim.
class SlotMeetings {
 public:
  // Throws InvariantError where slots of `src` overlap.
  SlotMeetings(const std::vector<IntervalList>& src, const std::vector<IntervalList>& dst);

  struct Met {
    int64_t slot = 0;      // of the other grid
    int64_t elements = 0;  // in common, above 0
    int64_t before = 0;    // in common with those before this one in the list
    int64_t index = 0;     // in the other slot's own list, of this one
  };
  // Ascending by slot.
  const std::vector<Met>& of_src(int64_t slot) const { return of_src_[slot]; }
  const std::vector<Met>& of_dst(int64_t slot) const { return of_dst_[slot]; }
  // Nothing where the two slots have nothing in common.
  const Met* between(int64_t src_slot, int64_t dst_slot) const;

 private:
  std::vector<std::vector<Met>> of_src_;
  std::vector<std::vector<Met>> of_dst_;
};

}  // namespace shardwright
