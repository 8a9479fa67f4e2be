// The parts into which a layout without partials cuts a tensor, as a grid over tensor dims, and the overlaps of two
// grids.
//
// A *slot* is a part of one tensor dim: one combination of coordinates on the mesh dims that cut it. A part of the
// tensor has one slot of each tensor dim. The ranks that hold it differ in the other mesh dims; they are its replicas,
// numbered in mesh order.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "layout/layout.h"
#include "layout/rank.h"
#include "layout/selection.h"

namespace shardwright {

// A dim of a grid: the indices [begin, begin + length) of a tensor dim; or one index, 0, that is no dim of the tensor.
struct Window {
  static constexpr int kNoDim = -1;

  int tensor_dim = kNoDim;
  int64_t begin = 0;
  int64_t length = 1;
};

class Grid {
 public:
  explicit Grid(const Layout& layout);
  // A box of the tensor, as if it were a tensor of its own, with its dims in any order. Every tensor dim must be in
  // exactly one window.
  Grid(const Layout& layout, const std::vector<Window>& windows);

  int ndim() const { return static_cast<int>(lists_.size()); }
  // Returns the indices of each slot of a tensor dim. With windows, dims are windows, and indices count from their
  // beginnings.
  const std::vector<IntervalList>& lists(int tensor_dim) const { return lists_[tensor_dim]; }
  int64_t replicas() const { return replicas_; }
  int64_t parts() const { return mesh_->size() / replicas_; }

  // The part that a rank holds, and its number among the replicas of it. Parts have numbers below parts().
  struct Seat {
    int64_t part = 0;
    int64_t replica = 0;
    bool operator==(const Seat&) const = default;
  };
  Seat seat_at(int64_t position) const { return seats_[position]; }
  // Returns nullopt if the rank is not part of the mesh.
  std::optional<Seat> seat_of(Rank rank) const;
  Rank rank_at(std::span<const int64_t> slots, int64_t replica) const;
  std::vector<Rank> ranks() const { return mesh_->ranks(); }  // by position

  // Returns the slots of a part, by tensor dim. Valid while the grid is.
  std::span<const int64_t> slots_of(int64_t part) const {
    return std::span<const int64_t>(slots_).subspan(part * lists_.size(), lists_.size());
  }
  int64_t part_of(std::span<const int64_t> slots) const;
  // Returns the indices of a part, and where each dim of the grid lies in its local tensor.
  Region region(int64_t part) const;
  std::vector<LocalAxis> local_axes(int64_t part) const;

 private:
  void number_parts();

  MeshPtr mesh_;
  std::vector<std::vector<int>> cutting_;  // by tensor dim: mesh dims, first cut first
  std::vector<int> replicating_;           // mesh dims that cut nothing
  int64_t replicas_ = 1;
  std::vector<std::vector<IntervalList>> lists_;
  std::vector<int> tensor_dims_;                       // by dim of the grid
  std::vector<std::vector<int64_t>> first_positions_;  // of the window in the local part, by slot
  std::vector<int64_t> slots_;                         // by part and tensor dim
  std::vector<Seat> seats_;                            // by position
};

// The pairs of slots of two grids that have indices in common, on one tensor dim.
class SlotMeetings {
 public:
  // Throws InvariantError if slots of `src` overlap.
  SlotMeetings(const std::vector<IntervalList>& src, const std::vector<IntervalList>& dst);

  struct Met {
    int64_t slot = 0;      // the slot of the other grid
    int64_t elements = 0;  // in common, above 0
    int64_t before = 0;    // the sum of `elements` of the entries before this one in the list
    int64_t index = 0;     // the index of the same pair in the other slot's list
  };
  // Ascending by slot.
  std::span<const Met> of_src(int64_t slot) const { return of_src_.of(slot); }
  std::span<const Met> of_dst(int64_t slot) const { return of_dst_.of(slot); }
  // Returns null if the two slots have no index in common.
  const Met* between(int64_t src_slot, int64_t dst_slot) const;

 private:
  // The lists of all slots, one after the other.
  struct Lists {
    std::vector<Met> all;
    std::vector<size_t> begins;  // by slot, and where the last one ends
    std::span<const Met> of(int64_t slot) const {
      return std::span<const Met>(all).subspan(begins[slot], begins[slot + 1] - begins[slot]);
    }
  };
  Lists of_src_;
  Lists of_dst_;
};

}  // namespace shardwright
