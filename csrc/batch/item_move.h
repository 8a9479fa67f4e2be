// How the elements of one item move: who sends what to whom. The same on all ranks.
//
// An item whose layouts are partitions and flatten alike is a crossing (crossing/crossing.h) of boxes. All others, with
// pieces that are ordered otherwise or held more than once, or with dims that only one side flattens, are
// rearrangements (crossing/rearrangement.h). These have an axis for each axis of the map, except that those which a
// side flattens are one axis: of all their combinations, row-major, in the order of that side.
//
//   source (4, 6), flattened, to rows 4 to 7 of a fused (12, 6):   one axis of 24
//   source (4, 6), flattened, to columns 2 and 3 of (4, 4):        one axis of 8, of which a row of the source has 2
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "batch/index_map.h"
#include "batch/rank_move.h"
#include "layout/layout.h"

namespace shardwright {

// Elements travel in the smaller of two dtypes, so that a cast comes before the move or after it; in that of the
// destination if they are equally large.
inline bool travels_as_source(const Layout& src, const Layout& dst) {
  return src.dtype().size_bytes() < dst.dtype().size_bytes();
}
inline DType wire_dtype(const Layout& src, const Layout& dst) {
  return travels_as_source(src, dst) ? src.dtype() : dst.dtype();
}

class ItemMove {
 public:
  struct Parcel {
    Rank peer{};
    int64_t elements = 0;
  };

  virtual ~ItemMove() = default;

  // The ranks of both meshes, ascending.
  virtual const std::vector<Rank>& ranks() const = 0;
  virtual int64_t received_elements(Rank rank) const = 0;
  virtual int64_t sent_elements(Rank rank) const = 0;
  // A number of parcels that a rank receives or sends at most.
  virtual int64_t parcels_received_at_most(Rank rank) const = 0;
  virtual int64_t parcels_sent_at_most(Rank rank) const = 0;
  virtual std::vector<Parcel> receives(Rank rank) const = 0;  // by ascending peer, several from some

  // How many ranks need each element, whether or not they hold it.
  virtual int64_t needed_elements() const = 0;
  // What all needers want of each set of holders, ascending; nullopt if that is not known.
  virtual std::optional<std::map<std::vector<Rank>, int64_t>> wanted_of_holders() const = 0;

  // What one rank does; nothing on a rank of neither mesh.
  virtual RankMove of_rank(Rank rank) const = 0;
};

using ItemMovePtr = std::shared_ptr<const ItemMove>;

// Makes the moves of items with equal layouts and maps, which may take turns in which holder begins.
class ItemFamily {
 public:
  // Where the holders' shares would be below this, one holder sends a whole message instead.
  static constexpr int64_t kLeastShareBytes = 16 << 10;
  static constexpr int64_t kMaxTurns = 16;

  // The layouts must have no pending reductions. Throws UserError if a part that is flattened has too many runs.
  ItemFamily(const Layout& src, const Layout& dst, const IndexMap& map);

  int64_t turns() const { return turns_; }
  ItemMovePtr move(int64_t turn) const;

 private:
  ItemMovePtr crossing(const IndexMap& map);

  const Layout& src_;
  const Layout& dst_;
  std::optional<IndexMap> in_local_dims_;
  ItemMovePtr only_;  // if all take the same turn
  int64_t turns_ = 1;
  int64_t replicas_each_ = 1;
};

// What all ranks receive if the item is moved from `src`.
int64_t received_elements(const Layout& src, const Layout& dst, const IndexMap& map);

// The map between the dims of Layout::shape() if both sides flatten the same dims, in order, of which all but the first
// are whole; nullopt otherwise. Rows 2 and 3 of (4, 6), both flattened, to rows 0 and 1 are [12, 24) to [0, 12).
std::optional<IndexMap> map_of_local_dims(const Layout& src, const Layout& dst, const IndexMap& map);

// Throws UserError as ItemFamily does.
ItemMovePtr rearranged(const Layout& src, const Layout& dst, const IndexMap& map);  // rearranged_item.cpp

}  // namespace shardwright
