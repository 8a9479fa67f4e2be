#include "batch/item_move.h"

#include <algorithm>
#include <span>
#include <utility>

#include "crossing/crossing.h"

namespace shardwright {
namespace {

Region region_of(const Grid& grid, int64_t part) {
  Region region;
  for (int t = 0; t < grid.ndim(); ++t) region.push_back(grid.lists(t)[grid.slots_of(part)[t]]);
  return region;
}

Region region_of(const Grid& grid, Rank rank) { return region_of(grid, grid.seat_of(rank)->part); }

// Each window's axis, on its own dim of the local tensor.
std::vector<LocalAxis> local_axes(const std::vector<Window>& windows, const std::vector<int64_t>& firsts) {
  std::vector<LocalAxis> axes;
  for (size_t a = 0; a < windows.size(); ++a) {
    const int dim = windows[a].tensor_dim;
    axes.push_back(dim == Window::kNoDim ? LocalAxis{} : LocalAxis{{dim}, {}, firsts[a]});
  }
  return axes;
}

class CrossingMove final : public ItemMove {
 public:
  CrossingMove(const Layout& src, const Layout& dst, const IndexMap& map, Sharing sharing, int64_t first_turn)
      : src_windows_(map.src_windows()),
        dst_windows_(map.dst_windows()),
        crossing_(Grid(src, src_windows_), Grid(dst, dst_windows_), wire_dtype(src, dst).size_bytes(), sharing,
                  first_turn),
        elements_(map.num_elements()) {}

  const Crossing& crossing() const { return crossing_; }

  const std::vector<Rank>& ranks() const override { return crossing_.ranks(); }
  int64_t received_elements(Rank rank) const override { return crossing_.received_elements(rank); }
  int64_t sent_elements(Rank rank) const override { return crossing_.sent_elements(rank); }
  int64_t parcels_received_at_most(Rank rank) const override { return crossing_.parcels_received_at_most(rank); }
  int64_t parcels_sent_at_most(Rank rank) const override { return crossing_.parcels_sent(rank); }
  std::vector<Parcel> receives(Rank rank) const override {
    std::vector<Parcel> parcels;
    for (const auto& [peer, range] : crossing_.receives(rank)) parcels.push_back({peer, range.end - range.begin});
    return parcels;
  }

  int64_t needed_elements() const override { return elements_ * crossing_.dst().replicas(); }
  std::optional<std::map<std::vector<Rank>, int64_t>> wanted_of_holders() const override {
    std::map<std::vector<Rank>, int64_t> wanted;
    const Grid& src = crossing_.src();
    for (int64_t part = 0; part < src.parts(); ++part) {
      const int64_t elements = crossing_.wanted_elements(part);
      if (elements == 0) continue;
      const std::span<const int64_t> slots = src.slots_of(part);
      std::vector<Rank> holders;
      for (int64_t replica = 0; replica < src.replicas(); ++replica) holders.push_back(src.rank_at(slots, replica));
      std::sort(holders.begin(), holders.end());
      wanted[std::move(holders)] += elements;
    }
    return wanted;
  }

  RankMove of_rank(Rank rank) const override {
    RankMove move;
    const Grid& src = crossing_.src();
    const Grid& dst = crossing_.dst();
    const std::optional<Grid::Seat> holds = src.seat_of(rank);
    const std::optional<Grid::Seat> needs = dst.seat_of(rank);
    const auto firsts = [](const Grid& grid, const Grid::Seat& seat) {
      std::vector<int64_t> positions;
      for (int a = 0; a < grid.ndim(); ++a) positions.push_back(grid.first_position(a, grid.slots_of(seat.part)[a]));
      return positions;
    };
    if (holds) {
      const Region held = region_of(src, holds->part);
      for (const auto& [peer, range] : crossing_.sends(rank)) {
        move.sends.push_back({peer, Selection(held, region_of(dst, peer)).slice(range.begin, range.end)});
      }
      move.src_axes = local_axes(src_windows_, firsts(src, *holds));
    }
    if (!needs) return move;
    const Region needed = region_of(dst, needs->part);
    for (const auto& [peer, range] : crossing_.receives(rank)) {
      move.receives.push_back({peer, Selection(region_of(src, peer), needed).slice(range.begin, range.end)});
    }
    move.dst_axes = local_axes(dst_windows_, firsts(dst, *needs));
    if (!holds) return move;
    Selection own(region_of(src, holds->part), needed);
    if (own.count() > 0) move.own = std::move(own);
    return move;
  }

 private:
  std::vector<Window> src_windows_;
  std::vector<Window> dst_windows_;
  Crossing crossing_;
  int64_t elements_;
};

}  // namespace

std::optional<IndexMap> map_of_local_dims(const Layout& src, const Layout& dst, const IndexMap& map) {
  const int flattened = src.flattened();
  if (flattened != dst.flattened()) return std::nullopt;
  if (flattened == 1) return map;
  const std::vector<int64_t> src_shape = src.tensor_shape();
  const std::vector<int64_t> dst_shape = dst.tensor_shape();
  int64_t row = 1;  // elements of an index of the first dim
  for (const MapAxis& axis : map.axes()) {
    const bool is_flattened =
        (axis.src_dim >= 0 && axis.src_dim < flattened) || (axis.dst_dim >= 0 && axis.dst_dim < flattened);
    if (!is_flattened) continue;
    if (axis.src_dim != axis.dst_dim) return std::nullopt;
    if (axis.src_dim == 0) continue;
    const int64_t size = src_shape[axis.src_dim];
    if (axis.length != size || dst_shape[axis.dst_dim] != size) return std::nullopt;
    row *= size;
  }
  std::vector<MapAxis> axes;
  const auto local = [&](int dim) { return dim < 0 ? dim : std::max(dim - flattened + 1, 0); };
  for (const MapAxis& axis : map.axes()) {
    const bool is_first = axis.src_dim == 0 && axis.dst_dim == 0;
    if (!is_first && axis.src_dim >= 0 && axis.src_dim < flattened) continue;
    MapAxis made{local(axis.src_dim), local(axis.dst_dim), axis.src_begin, axis.dst_begin, axis.length};
    if (is_first) {
      made.src_begin *= row;
      made.dst_begin *= row;
      made.length *= row;
    }
    axes.push_back(made);
  }
  return IndexMap(std::move(axes));
}

ItemFamily::ItemFamily(const Layout& src, const Layout& dst, const IndexMap& map) : src_(src), dst_(dst) {
  if (src.is_partition() && dst.is_partition()) in_local_dims_ = map_of_local_dims(src, dst, map);
  only_ = in_local_dims_ ? crossing(*in_local_dims_) : rearranged(src, dst, map);
}

// Returns null, and sets the number of turns, if there is more than one.
ItemMovePtr ItemFamily::crossing(const IndexMap& map) {
  auto by_bytes = std::make_shared<const CrossingMove>(src_, dst_, map, Sharing::kBytes, 0);
  const int64_t replicas = by_bytes->crossing().src().replicas();
  const bool shares = by_bytes->crossing().longest_stretch() * wire_dtype(src_, dst_).size_bytes() >= kLeastShareBytes;
  if (shares || replicas == 1) return by_bytes;
  turns_ = std::min(replicas, kMaxTurns);
  replicas_each_ = replicas / turns_;
  return nullptr;
}

ItemMovePtr ItemFamily::move(int64_t turn) const {
  if (only_) return only_;
  return std::make_shared<const CrossingMove>(src_, dst_, *in_local_dims_, Sharing::kMessages, turn * replicas_each_);
}

int64_t received_elements(const Layout& src, const Layout& dst, const IndexMap& map) {
  const ItemMovePtr move = ItemFamily(src, dst, map).move(0);
  int64_t elements = 0;
  for (const Rank rank : move->ranks()) elements += move->received_elements(rank);
  return elements;
}

}  // namespace shardwright
