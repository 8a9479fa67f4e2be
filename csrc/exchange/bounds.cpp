#include "exchange/bounds.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "exchange/grid.h"
#include "exchange/indexed_bound.h"
#include "support/ceil_divide.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Returns the layout with replicas in place of pending reductions.
Layout without_partials(const Layout& layout) {
  return layout.with(layout.cuts(), std::vector<Placement>(layout.mesh().ndim(), Placement::replicate()));
}

// Computes the bounds for layouts that are partitions and outlive the object. Cells and their senders and receivers are
// defined in exchange_bound.h.
class Bounds {
 public:
  Bounds(const Layout& src, const Layout& dst)
      : src_layout_(src), dst_layout_(dst), src_(without_partials(src)), dst_(without_partials(dst)) {
    for (int t = 0; t < src.ndim(); ++t) overlaps_.emplace_back(src_.lists(t), dst_.lists(t));
    const std::vector<Rank> from = src_.mesh().ranks();
    for (size_t p = 0; p < from.size(); ++p) {
      RankParts& parts = parts_of_[from[p]];
      parts.src_position = static_cast<int64_t>(p);
      parts.src_part = src_.part_replica_at(parts.src_position).part;
    }
    const std::vector<Rank> to = dst_.mesh().ranks();
    for (size_t p = 0; p < to.size(); ++p) {
      RankParts& parts = parts_of_[to[p]];
      parts.dst_position = static_cast<int64_t>(p);
      parts.dst_part = dst_.part_replica_at(parts.dst_position).part;
      if (parts.src_part == kNone) continue;
      const Cell cell{parts.src_part, parts.dst_part};
      if (elements_of_cell(cell.first, cell.second) > 0) keepers_[cell].push_back(&parts);
    }
  }

  // Returns the bounds for ranks (not for nodes) if neither layout has partials.
  ExchangeBound without_reductions() const {
    ExchangeBound bound;
    int64_t received_max = 0;
    int64_t received_sum = 0;
    for (const auto& [rank, parts] : parts_of_) {
      if (parts.dst_part == kNone) continue;
      const int64_t kept = parts.src_part == kNone ? 0 : elements_of_cell(parts.src_part, parts.dst_part);
      const int64_t missing = part_size(dst_, parts.dst_part) - kept;
      received_max = std::max(received_max, missing);
      received_sum += missing;
    }
    bound.direct_sent = {std::ranges::max(requested_of_parts()), src_.replicas()};
    set_forwarding_bounds(received_sum, bound);
    const int64_t item = src_layout_.dtype().size_bytes();
    bound.received_bytes_max = received_max * item;
    bound.received_bytes_sum = received_sum * item;
    bound.direct_sent_bytes_max = bound.direct_sent.rounded_up() * item;
    bound.forwarded_sent_bytes_max = bound.forwarded_sent.rounded_up() * item;
    return bound;
  }

  // Returns the bounds for ranks (not for nodes) if a layout has partials: a lower bound on the transfers of all ranks
  // together, and its mean over ranks.
  ExchangeBound with_reductions() const {
    const int64_t contributions = src_layout_.mesh().group_size(src_layout_.partial_dims());
    const int64_t replicas = dst_layout_.mesh().group_size(dst_layout_.replicated_dims());
    int64_t transfers = src_layout_.num_elements() * (contributions + replicas - 1);
    for (const auto& [cell, ranks] : keepers_) {
      std::set<int64_t> contributions_of_cell;
      std::set<int64_t> replicas_of_cell;
      for (const RankParts* parts : ranks) {
        contributions_of_cell.insert(
            src_layout_.mesh().coordinate_index(parts->src_position, src_layout_.partial_dims().to_vector()));
        replicas_of_cell.insert(
            dst_layout_.mesh().coordinate_index(parts->dst_position, dst_layout_.replicated_dims().to_vector()));
      }
      // A rank that has a contribution and is a replica saves one transfer. Each contribution and each replica saves at
      // most one. If the source has no pending reductions, each replica that holds the value saves one.
      auto saved = static_cast<int64_t>(replicas_of_cell.size());
      if (contributions > 1) saved = std::min(saved, static_cast<int64_t>(contributions_of_cell.size()));
      transfers -= elements_of_cell(cell.first, cell.second) * saved;
    }
    ExchangeBound bound;
    bound.direct_is_exact = bound.forwarded_is_exact = false;
    const auto ranks = static_cast<int64_t>(parts_of_.size());
    bound.direct_sent = bound.forwarded_sent = {transfers, ranks};
    const int64_t item = src_layout_.dtype().size_bytes();
    bound.received_bytes_sum = transfers * item;
    bound.received_bytes_max = ceil_divide(transfers, ranks) * item;
    bound.direct_sent_bytes_max = bound.forwarded_sent_bytes_max = bound.any_sent_bytes_max = bound.received_bytes_max;
    return bound;
  }

  // Sets the bounds on bytes that enter nodes; not if nodes are unknown or too large. Parts of the destination are
  // disjoint, so the ranks of a node together need the sum of the sizes of their different parts.
  void set_bounds_into_nodes(int64_t ranks_per_node, ExchangeBound& bound) const {
    if (ranks_per_node <= 0 || ranks_per_node > ExchangeBound::kMaxNode) return;
    const int64_t item = src_layout_.dtype().size_bytes();
    for (auto at = parts_of_.begin(); at != parts_of_.end();) {
      const int64_t node = to_int(at->first) / ranks_per_node;
      std::set<int64_t> held;    // parts of the source that ranks of the node hold
      std::set<int64_t> needed;  // parts of the destination that ranks of the node need
      int64_t ranks = 0;
      for (; at != parts_of_.end() && to_int(at->first) / ranks_per_node == node; ++at, ++ranks) {
        if (at->second.src_part != kNone) held.insert(at->second.src_part);
        if (at->second.dst_part != kNone) needed.insert(at->second.dst_part);
      }
      int64_t missing = 0;
      for (const int64_t part : needed) {
        missing += part_size(dst_, part);
        for (const int64_t own : held) missing -= elements_of_cell(own, part);
      }
      bound.node_bytes_max = std::max(bound.node_bytes_max, missing * item);
      bound.node_bytes_per_rank = std::max(bound.node_bytes_per_rank, ceil_divide(missing, ranks) * item);
    }
  }

  // Sets the bound on bytes that leave nodes; not if nodes are unknown or there are too many cells. The elements of a
  // part leave its node if only this node holds the part and another node needs them.
  void set_bounds_out_of_nodes(int64_t ranks_per_node, ExchangeBound& bound) const {
    if (ranks_per_node <= 0 || num_cells() > ExchangeBound::kMaxCells) return;
    std::map<int64_t, int64_t> ranks;                        // number of ranks by node
    std::vector<std::set<int64_t>> senders(src_.parts());    // nodes by part of the source
    std::vector<std::set<int64_t>> receivers(dst_.parts());  // nodes by part of the destination
    for (const auto& [rank, parts] : parts_of_) {
      const int64_t node = to_int(rank) / ranks_per_node;
      ++ranks[node];
      if (parts.src_part != kNone) senders[parts.src_part].insert(node);
      if (parts.dst_part != kNone) receivers[parts.dst_part].insert(node);
    }
    std::map<int64_t, int64_t> leaving;  // number of elements by node
    for (int64_t part = 0; part < src_.parts(); ++part) {
      if (senders[part].size() > 1) continue;
      const int64_t node = *senders[part].begin();
      for_each_overlap(part, [&](int64_t other, int64_t elements) {
        const bool leaves = receivers[other].size() > 1 || *receivers[other].begin() != node;
        leaving[node] += leaves ? elements : 0;
      });
    }
    for (const auto& [node, elements] : leaving) {
      const int64_t bytes = ceil_divide(elements, ranks[node]) * src_layout_.dtype().size_bytes();
      bound.leaving_bytes_per_rank = std::max(bound.leaving_bytes_per_rank, bytes);
    }
  }

 private:
  static constexpr int64_t kNone = -1;
  // The position and part of a rank on each side; kNone if the rank is not on that mesh.
  struct RankParts {
    int64_t src_position = kNone;
    int64_t src_part = kNone;  // index of the part in the grid
    int64_t dst_position = kNone;
    int64_t dst_part = kNone;
  };
  using Cell = std::pair<int64_t, int64_t>;  // parts of source and destination

  // Returns the number of elements of a cell.
  int64_t elements_of_cell(int64_t src_part, int64_t dst_part) const {
    const std::span<const int64_t> from = src_.shards_of(src_part);
    const std::span<const int64_t> to = dst_.shards_of(dst_part);
    int64_t elements = 1;
    for (size_t t = 0; t < overlaps_.size() && elements > 0; ++t) {
      const ShardOverlaps::Overlap* overlap = overlaps_[t].between(from[t], to[t]);
      elements *= overlap == nullptr ? 0 : overlap->elements;
    }
    return elements;
  }

  // Returns the number of elements of a part.
  static int64_t part_size(const Grid& grid, int64_t part) {
    int64_t elements = 1;
    for (int t = 0; t < grid.ndim(); ++t) elements *= length(grid.lists(t)[grid.shards_of(part)[t]]);
    return elements;
  }

  // Returns, for each part of the source, the number of elements that its receivers need, summed over receivers.
  std::vector<int64_t> requested_of_parts() const {
    std::vector<int64_t> requested(src_.parts());
    for (int64_t part = 0; part < src_.parts(); ++part) requested[part] = part_size(src_, part) * dst_.replicas();
    for (const auto& [cell, ranks] : keepers_) {
      requested[cell.first] -= elements_of_cell(cell.first, cell.second) * static_cast<int64_t>(ranks.size());
    }
    return requested;
  }

  // Returns, for each part of the source, the number of elements that some rank needs and does not hold.
  std::vector<int64_t> leaving_of_parts() const {
    std::vector<int64_t> leaving(src_.parts());
    for (int64_t part = 0; part < src_.parts(); ++part) leaving[part] = part_size(src_, part);
    for (const auto& [cell, ranks] : keepers_) {
      if (static_cast<int64_t>(ranks.size()) == dst_.replicas()) {
        leaving[cell.first] -= elements_of_cell(cell.first, cell.second);
      }
    }
    return leaving;
  }

  // Calls visit(part, elements) for every part of the destination that has elements in common with a part of the
  // source. `shards` and `elements` are for the recursion over tensor dims: the shards chosen so far, and the number of
  // common indices on their dims.
  template <typename Visit>
  void for_each_overlap(int64_t src_part, const Visit& visit, std::vector<int64_t> shards = {},
                        int64_t elements = 1) const {
    if (shards.size() == overlaps_.size()) return visit(dst_.part_of(shards), elements);
    const size_t t = shards.size();
    shards.push_back(0);
    for (const ShardOverlaps::Overlap& overlap : overlaps_[t].of_src(src_.shards_of(src_part)[t])) {
      shards[t] = overlap.shard;
      for_each_overlap(src_part, visit, shards, elements * overlap.elements);
    }
  }

  // Returns the number of cells, including cells without receivers.
  int64_t num_cells() const {
    int64_t cells = 1;
    for (const ShardOverlaps& overlaps : overlaps_) cells *= overlaps.num_pairs();
    return cells;
  }

  // Sets the bounds `any` and `forwarded` of exchange_bound.h, without forwarded_sent_bytes_max. `received_sum` is the
  // number of elements that all ranks receive.
  void set_forwarding_bounds(int64_t received_sum, ExchangeBound& bound) const {
    const std::vector<int64_t> leaving = leaving_of_parts();
    const Ratio mean{received_sum, static_cast<int64_t>(parts_of_.size())};
    const Ratio least_out{*std::max_element(leaving.begin(), leaving.end()), src_.replicas()};
    const Ratio& any = least_out.rounded_up() > mean.rounded_up() ? least_out : mean;
    bound.any_sent_bytes_max = any.rounded_up() * src_layout_.dtype().size_bytes();
    bound.forwarded_is_exact = num_cells() <= ExchangeBound::kMaxCells;
    bound.forwarded_sent = bound.forwarded_is_exact ? min_max_load(forwarded_work(leaving)) : any;
  }

  // Returns the work of the bound `forwarded`, as teams, pools and jobs (exchange/load.h). A team is the ranks with the
  // same part of the source and the same part of the destination. A pool is all ranks with one part of the source, or
  // all ranks with one part of the destination. Each part of the source is one job of its candidate senders: the one
  // copy of its elements that must leave them. Each cell is one job of its senders and receivers: all further copies.
  // `leaving` is leaving_of_parts().
  SharedWork forwarded_work(const std::vector<int64_t>& leaving) const {
    SharedWork work;
    work.pools.resize(src_.parts() + dst_.parts());
    std::map<Cell, int> teams;
    for (const auto& [rank, parts] : parts_of_) {
      const auto [team, is_new] = teams.try_emplace({parts.src_part, parts.dst_part}, static_cast<int>(teams.size()));
      if (is_new) {
        work.team_sizes.push_back(0);
        if (parts.src_part != kNone) work.pools[parts.src_part].push_back(team->second);
        if (parts.dst_part != kNone) work.pools[src_.parts() + parts.dst_part].push_back(team->second);
      }
      ++work.team_sizes[team->second];
    }
    for (int64_t part = 0; part < src_.parts(); ++part) {
      if (leaving[part] > 0) work.jobs.push_back({leaving[part], {static_cast<int>(part)}});
      for_each_overlap(part, [&](int64_t other, int64_t elements) {
        const auto keepers = keepers_.find({part, other});
        const int64_t receivers =
            dst_.replicas() - (keepers == keepers_.end() ? 0 : static_cast<int64_t>(keepers->second.size()));
        if (receivers < 2) return;
        work.jobs.push_back(
            {elements * (receivers - 1), {static_cast<int>(part), static_cast<int>(src_.parts() + other)}});
      });
    }
    return work;
  }

  const Layout& src_layout_;
  const Layout& dst_layout_;
  Grid src_;
  Grid dst_;
  std::vector<ShardOverlaps> overlaps_;
  std::map<Rank, RankParts> parts_of_;
  std::map<Cell, std::vector<const RankParts*>> keepers_;  // by cell: the ranks that hold it and need it
};

}  // namespace

ExchangeBound exchange_bound(const Layout& src, const Layout& dst, int64_t ranks_per_node) {
  if (needs_rearrangement(src, dst)) return indexed_bound(src, dst, ranks_per_node);
  check_invariant(src.shape() == dst.shape() && src.dtype() == dst.dtype(),
                  "the layouts of a bound differ in shape or dtype: ", src, " and ", dst);
  const Bounds bounds(src, dst);
  if (!src.partial_dims().empty() || !dst.partial_dims().empty()) return bounds.with_reductions();
  ExchangeBound bound = bounds.without_reductions();
  bounds.set_bounds_into_nodes(ranks_per_node, bound);
  bounds.set_bounds_out_of_nodes(ranks_per_node, bound);
  return bound;
}

}  // namespace shardwright
