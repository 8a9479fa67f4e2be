#include "exchange/indexed_bound.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "exchange/cells.h"
#include "exchange/indexed_exchange.h"
#include "support/ceil_divide.h"

namespace shardwright {
namespace {

// Sets the bounds of nodes. Elements must enter a node if a rank of the node needs them and none holds them. Elements
// must leave a node if only its ranks hold them and a rank of another node needs them.
void set_node_bounds(const Cells& cells, const std::vector<Rank>& ranks, int64_t ranks_per_node, int64_t item_bytes,
                     ExchangeBound& bound) {
  if (ranks_per_node <= 0) return;
  struct Node {
    int64_t ranks = 0;
    int64_t entering = 0;
    int64_t leaving = 0;
  };
  std::map<int64_t, Node> nodes;
  const auto node_of = [&](size_t i) { return to_int(ranks[i]) / ranks_per_node; };
  for (size_t i = 0; i < ranks.size(); ++i) ++nodes[node_of(i)].ranks;
  const auto nodes_of = [&](const IndexSet& rank_set) {
    std::set<int64_t> node_numbers;
    for (const size_t i : rank_set.indices()) node_numbers.insert(node_of(i));
    return node_numbers;
  };
  for (const Cells::Cell& cell : cells.all()) {
    const std::set<int64_t> holding = nodes_of(cell.senders);
    const std::set<int64_t> needing = nodes_of(cell.receivers);
    for (const int64_t node : needing) {
      if (!holding.contains(node)) nodes[node].entering += cell.elements;
    }
    if (holding.size() == 1 && !(needing == holding)) nodes[*holding.begin()].leaving += cell.elements;
  }
  for (const auto& [node_index, node] : nodes) {
    const auto raise = [&](int64_t& bytes, int64_t elements) { bytes = std::max(bytes, elements * item_bytes); };
    raise(bound.node_bytes_per_rank, ceil_divide(node.entering, node.ranks));
    raise(bound.leaving_bytes_per_rank, ceil_divide(node.leaving, node.ranks));
    if (ranks_per_node <= ExchangeBound::kMaxNode) raise(bound.node_bytes_max, node.entering);
  }
}

// Returns a lower bound on the number of transfers of all ranks together: for each element, its number of contributions
// plus its number of replicas in the destination, less two. A mesh dim that becomes partial needs only one replica.
// `kept` has the mesh dims that stay pending; each of their coordinates has a tensor of its own.
int64_t transfers_with_reductions(const Layout& src, const Layout& dst, MeshDimSet kept) {
  const Mesh& mesh = src.mesh();
  const int64_t contributions = mesh.group_size(src.partial_dims() - kept);
  int64_t needed = 0;  // elements of all replicas
  for (int64_t p = 0; p < dst.mesh().size(); ++p) needed += num_elements(dst.region(p));
  needed /= dst.mesh().group_size(dst.partial_dims() - kept);
  const int64_t tensors = src.num_elements() * mesh.group_size(kept);
  return std::max<int64_t>(tensors * (contributions - 2) + needed, 0);
}

}  // namespace

ExchangeBound indexed_bound(const Layout& src, const Layout& dst, int64_t ranks_per_node) {
  const MeshDimSet kept = kept_partials(src, dst);
  const std::vector<Rank> ranks = ranks_of(src.mesh(), dst.mesh());
  const auto num_ranks = static_cast<int64_t>(ranks.size());
  const int64_t item = src.dtype().size_bytes();
  const bool reduces = !(src.partial_dims() - kept).empty();
  ExchangeBound bound;
  bound.direct_is_exact = bound.forwarded_is_exact = false;
  if (!reduces && !(dst.partial_dims() - kept).empty()) return bound;  // a rank may hold any share of the value

  const AxisGrids grids = axis_grids(src, dst);
  int64_t received_sum = 0;
  int64_t received_max = 0;
  if (reduces) {
    received_sum = transfers_with_reductions(src, dst, kept);
    received_max = ceil_divide(received_sum, num_ranks);
  } else {
    const IndexedExchange exchange(grids, item, ReplicaPolicy::kWholeMessages);
    for (const Rank rank : ranks) {
      const int64_t received = exchange.num_elements(rank, Direction::kReceive);
      received_sum += received;
      received_max = std::max(received_max, received);
    }
  }
  bound.received_bytes_max = received_max * item;
  bound.received_bytes_sum = received_sum * item;
  bound.direct_sent = {received_sum, reduces ? num_ranks : src.mesh().size()};
  bound.forwarded_sent = {received_sum, num_ranks};
  int64_t any_sent = bound.forwarded_sent.rounded_up();
  if (const std::optional<Cells> cells = reduces ? std::nullopt : Cells::of(grids.src, grids.dst, ranks)) {
    bound.direct_sent = cells->direct_load();
    bound.forwarded_sent = cells->forwarded_load();
    bound.direct_is_exact = bound.forwarded_is_exact = true;
    any_sent = std::max(any_sent, cells->leaving_load().rounded_up());
    set_node_bounds(*cells, ranks, ranks_per_node, item, bound);
  }
  bound.direct_sent_bytes_max = bound.direct_sent.rounded_up() * item;
  bound.forwarded_sent_bytes_max = bound.forwarded_sent.rounded_up() * item;
  bound.any_sent_bytes_max = any_sent * item;
  return bound;
}

}  // namespace shardwright
