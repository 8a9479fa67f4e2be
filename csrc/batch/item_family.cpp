#include "batch/item_family.h"

#include <algorithm>
#include <utility>

#include "exchange/grid_exchange.h"
#include "exchange/indexed_exchange.h"

namespace shardwright {
namespace {

// Returns the map between the dims of Layout::shape(), which counts flattened dims as one. Returns nullopt unless both
// layouts flatten the same dims, the map keeps the order of these dims, and it covers each of them except the first
// completely. Example: both dims of (4, 6) are flattened; the map of rows 2 and 3 to rows 0 and 1 becomes [12, 24) to
// [0, 12).
std::optional<IndexMap> map_of_local_dims(const Layout& src, const Layout& dst, const IndexMap& map) {
  const int flattened = src.flattened();
  if (flattened != dst.flattened()) return std::nullopt;
  if (flattened == 1) return map;
  const std::vector<int64_t> src_shape = src.tensor_shape();
  const std::vector<int64_t> dst_shape = dst.tensor_shape();
  int64_t row = 1;  // elements per index of the first dim
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
  const auto local_dim = [&](int dim) { return dim < 0 ? dim : std::max(dim - flattened + 1, 0); };
  for (const MapAxis& axis : map.axes()) {
    const bool is_first = axis.src_dim == 0 && axis.dst_dim == 0;
    if (!is_first && axis.src_dim >= 0 && axis.src_dim < flattened) continue;
    MapAxis local_axis{local_dim(axis.src_dim), local_dim(axis.dst_dim), axis.src_begin, axis.dst_begin, axis.length};
    if (is_first) {
      local_axis.src_begin *= row;
      local_axis.dst_begin *= row;
      local_axis.length *= row;
    }
    axes.push_back(local_axis);
  }
  return IndexMap(std::move(axes));
}

// Returns an exchange in which candidate senders send equally many elements, or whole messages if even the busiest
// sender would send less than kLeastShareBytes.
ExchangePtr indexed_exchange(const Layout& src, const Layout& dst, const IndexMap& map) {
  const AxisGrids grids = axis_grids(src, dst, map);
  const auto with_policy = [&](ReplicaPolicy policy) {
    return std::make_shared<const IndexedExchange>(grids, wire_dtype(src, dst).size_bytes(), policy);
  };
  ExchangePtr by_bytes = with_policy(ReplicaPolicy::kEvenBytes);
  return by_bytes->maxima().sent_bytes < ItemFamily::kLeastShareBytes ? with_policy(ReplicaPolicy::kWholeMessages)
                                                                      : by_bytes;
}

// Returns the exchange between the box of the source that the map reads and the box of the destination that it writes.
// The map is between dims of Layout::shape(). `first_sender` is a replica of the source (item_family.h).
GridExchange grid_exchange_of(const Layout& src, const Layout& dst, const IndexMap& map, ReplicaPolicy policy,
                              int64_t first_sender) {
  return GridExchange(Grid(src, map.src_windows()), Grid(dst, map.dst_windows()), wire_dtype(src, dst).size_bytes(),
                      policy, first_sender);
}

}  // namespace

ItemFamily::ItemFamily(const Layout& src, const Layout& dst, const IndexMap& map) : src_(src), dst_(dst) {
  if (src.is_partition() && dst.is_partition()) local_map_ = map_of_local_dims(src, dst, map);
  only_exchange_ = local_map_ ? grid_exchange(*local_map_) : indexed_exchange(src, dst, map);
}

ExchangePtr ItemFamily::grid_exchange(const IndexMap& map) {
  auto by_bytes = std::make_shared<const GridExchange>(grid_exchange_of(src_, dst_, map, ReplicaPolicy::kEvenBytes, 0));
  const int64_t replicas = by_bytes->src().replicas();
  const bool shares = by_bytes->largest_quota() * wire_dtype(src_, dst_).size_bytes() >= kLeastShareBytes;
  if (shares || replicas == 1) return by_bytes;
  sender_groups_ = std::min(replicas, kMaxSenderGroups);
  first_sender_step_ = replicas / sender_groups_;
  return nullptr;
}

ExchangePtr ItemFamily::exchange(int64_t sender_group) const {
  if (only_exchange_) return only_exchange_;
  return std::make_shared<const GridExchange>(
      grid_exchange_of(src_, dst_, *local_map_, ReplicaPolicy::kWholeMessages, sender_group * first_sender_step_));
}

int64_t total_received_elements(const Layout& src, const Layout& dst, const IndexMap& map) {
  const ExchangePtr exchange = ItemFamily(src, dst, map).exchange(0);
  int64_t elements = 0;
  for (const Rank rank : exchange->ranks()) elements += exchange->num_elements(rank, Direction::kReceive);
  return elements;
}

}  // namespace shardwright
