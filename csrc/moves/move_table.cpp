#include "moves/move_table.h"

#include <algorithm>

#include "exchange/mesh_exchange.h"
#include "moves/spans.h"

namespace shardwright {
namespace {

// Returns the set in `allowed` with the smallest groups that includes `needed`, or with `exactly` equals it. Returns
// nullopt if there is none. Returns `needed` if `allowed` is empty, which allows all sets.
std::optional<MeshDimSet> allowed_span(MeshDimSet needed, const Mesh& mesh, const std::vector<MeshDimSet>& allowed,
                                       bool exactly) {
  if (allowed.empty()) return needed;
  std::optional<MeshDimSet> best;
  for (const MeshDimSet& dims : allowed) {
    const bool fits = exactly ? dims == needed : (dims & needed) == needed;
    if (fits && (!best || mesh.group_size(dims) < mesh.group_size(*best))) best = dims;
  }
  return best;
}

}  // namespace

MoveTable::MoveTable(const Layout& layout, Lowering lowering, bool ordered, MeshDimSet between_nodes)
    : layout_(layout),
      lowering_(lowering),
      ordered_(ordered),
      between_nodes_(between_nodes),
      node_size_(layout.mesh().size() / layout.mesh().group_size(between_nodes)),
      item_bytes_(layout.dtype().size_bytes()) {}

MoveTable::State MoveTable::state(const Cuts& cuts, MeshDimSet partial_dims) {
  State state{{}, {}, partial_dims, 1};
  for (int t = 0; t < layout_.ndim(); ++t) {
    state.lists.push_back(lists_.number_of(t, cuts[t]));
    const CutList& list = lists_.at(t, state.lists[t]);
    state.cut_dims = state.cut_dims | list.dims;
    state.elements *= list.length;
  }
  return state;
}

Cuts MoveTable::cuts(const State& state) const {
  Cuts cuts;
  for (int t = 0; t < layout_.ndim(); ++t) {
    cuts.push_back(canonical(layout_.mesh(), layout_.shape()[t], lists_.at(t, state.lists[t]).cuts));
  }
  return cuts;
}

std::optional<MoveTable::Move> MoveTable::move(const State& before, const State& after,
                                               const std::vector<MeshDimSet>& allowed) {
  if (!(after.partial_dims - before.partial_dims).empty() || before == after) return std::nullopt;
  const Mesh& mesh = layout_.mesh();
  const MeshDimSet reduced = before.partial_dims - after.partial_dims;
  if (!reduced.empty()) {
    const bool keeps = before.lists == after.lists;
    if (!keeps && !is_reduce_scatter(before, after, reduced)) return std::nullopt;
    if (!allowed_span(reduced, mesh, allowed, true)) return std::nullopt;
    return Move{keeps ? StepOp::kAllReduce : StepOp::kReduceScatter, reduced};
  }
  MeshDimSet dims;
  for (int t = 0; t < layout_.ndim(); ++t) {
    if (before.lists[t] != after.lists[t]) dims = dims | pairs_.at(t, before.lists[t], after.lists[t]).spanned;
  }
  // Ranks along mesh dims that do not cut `before` are replicas, so there is nothing to receive from them.
  dims = dims & before.cut_dims;
  if (dims.empty() || layout_.num_elements() == 0) {
    const MeshDimSet changed = (after.cut_dims - before.cut_dims) | (before.cut_dims - after.cut_dims);
    return Move{StepOp::kSlice, changed.empty() ? after.cut_dims : changed};
  }
  const std::optional<MeshDimSet> span = allowed_span(dims, mesh, allowed, false);
  if (!span) return std::nullopt;
  return Move{StepOp::kExchange, *span};
}

std::optional<MoveTable::Move> MoveTable::sending_whole_messages(const State& before, const State& after,
                                                                 const Move& exchange,
                                                                 const std::vector<MeshDimSet>& allowed) {
  if (exchange.op != StepOp::kExchange || (after.cut_dims - before.cut_dims).empty()) return std::nullopt;
  MeshDimSet replicas;
  for (int t = 0; t < layout_.ndim(); ++t) {
    const ListPair& pair = pairs_.at(t, before.lists[t], after.lists[t]);
    if (!pair.closed_form) return std::nullopt;
    for (const auto& [mesh_dim, radix] : pair.ties) {
      if (!before.cut_dims.contains(mesh_dim)) replicas.insert(mesh_dim);
    }
  }
  if (replicas.empty()) return std::nullopt;
  const Mesh& mesh = layout_.mesh();
  const MeshDimSet dims = exchange.mesh_dims | (after.cut_dims - before.cut_dims - before.partial_dims);
  if (mesh.group_size(dims) > MeshExchange::kMaxSharingGroup) return std::nullopt;
  if (!allowed.empty() && std::find(allowed.begin(), allowed.end(), dims) == allowed.end()) return std::nullopt;
  return Move{StepOp::kExchange, dims, ReplicaPolicy::kWholeMessages};
}

bool MoveTable::takes_long(const State& before, const State& after) {
  for (int t = 0; t < layout_.ndim(); ++t) {
    if (pairs_.at(t, before.lists[t], after.lists[t]).takes_long) return true;
  }
  return false;
}

bool MoveTable::may_be_slice(const State& before, const State& after) const {
  if (!(before.partial_dims == after.partial_dims) || before.cut_dims == after.cut_dims) return false;
  for (int t = 0; t < layout_.ndim(); ++t) {
    const MeshDimSet lost = lists_.at(t, before.lists[t]).dims - lists_.at(t, after.lists[t]).dims;
    if (!lost.empty()) return false;
  }
  return true;
}

StepCounts MoveTable::step_counts(const State& before, const State& after, const Move& move) {
  StepCounts maxima;
  maxima.touched_bytes = after.elements * item_bytes_;
  if (is_local(move.op)) return maxima;
  const int64_t k = layout_.mesh().group_size(move.mesh_dims);
  if (move.op == StepOp::kAllReduce) {
    const bool native = !ordered_ && reduces_natively(layout_, move.mesh_dims, lowering_);
    raise_to(maxima, all_reduce_traffic(before.elements, k, 0, item_bytes_, native));
    maxima.collectives = num_collectives(move.op, k, native);
    return maxima;
  }
  if (move.op == StepOp::kReduceScatter) {
    for (const Corner corner : lists_.corners().of(has_equal_parts(after) ? MeshDimSet() : move.mesh_dims)) {
      raise_to(maxima, reduce_scatter_traffic(corner_traffic_.elements(before.lists, corner),
                                              corner_traffic_.elements(after.lists, corner), k, item_bytes_));
    }
    return maxima;
  }
  StepCounts exchange = exchange_counts(before, after, move);
  exchange.touched_bytes = maxima.touched_bytes;
  return exchange;
}

bool MoveTable::has_equal_parts(const State& state) const {
  for (int t = 0; t < layout_.ndim(); ++t) {
    if (!lists_.at(t, state.lists[t]).has_equal_parts) return false;
  }
  return true;
}

std::optional<ClosedForm> MoveTable::closed_form(const State& before, const State& after) {
  ClosedForm all;
  for (int t = 0; t < layout_.ndim(); ++t) {
    const std::optional<ClosedForm>& form = pairs_.at(t, before.lists[t], after.lists[t]).closed_form;
    if (!form) return std::nullopt;
    all.differs = all.differs || form->differs;
    all.differs_between_nodes = all.differs_between_nodes || form->differs_between_nodes;
    all.shared *= form->shared;
    all.sources *= form->sources;
    all.shared_by_node *= form->shared_by_node;
    all.needed_by_node *= form->needed_by_node;
  }
  return all;
}

StepCounts MoveTable::exchange_counts(const State& before, const State& after, const Move& move) {
  const std::optional<ClosedForm> form = closed_form(before, after);
  if (form && move.policy == ReplicaPolicy::kWholeMessages) {
    // If replicas share the sending in whole messages, the worst rank receives its full part, in one message from each
    // source, and sends as many bytes in as many messages.
    return {after.elements * item_bytes_, after.elements * item_bytes_, form->sources, 0, 1, form->sources};
  }
  if (form) {
    // A rank sends as much as it receives, with one exception: a tie whose mesh dim did not cut before. Along this mesh
    // dim, only the replica with the matching coordinate sends, so it sends more.
    bool sender_differs = false;
    int64_t fan_out = 1;  // number of receivers of the busiest sender, per source of a receiver
    for (int t = 0; t < layout_.ndim(); ++t) {
      for (const auto& [mesh_dim, radix] : pairs_.at(t, before.lists[t], after.lists[t]).ties) {
        const bool did_cut = before.cut_dims.contains(mesh_dim);
        sender_differs = sender_differs || did_cut;
        if (!did_cut) fan_out *= radix;
      }
    }
    return {(after.elements - (form->differs ? 0 : form->shared)) * item_bytes_,
            (after.elements * fan_out - (sender_differs ? 0 : form->shared)) * item_bytes_,
            form->sources - (form->differs ? 0 : 1),
            0,
            1,
            fan_out * form->sources - (sender_differs ? 0 : 1)};
  }
  StepCounts maxima;
  const MeshDimSet varying = move.mesh_dims & before.cut_dims;
  for (const Corner corner : lists_.corners().of(move.mesh_dims)) {
    raise_to(maxima, exchange_traffic(before, after, varying, corner));
  }
  if (maxima.messages > 0) return maxima;
  // Nothing moves at these corners, because parts are very small. Data moves in other groups, or between inner
  // ranks.
  for (const Corner corner : lists_.corners().of(before.cut_dims | after.cut_dims | move.mesh_dims)) {
    raise_to(maxima, exchange_traffic(before, after, varying, corner));
  }
  if (maxima.messages == 0) raise_to(maxima, {item_bytes_, item_bytes_, 1, 1});
  return maxima;
}

Traffic MoveTable::exchange_traffic(const State& before, const State& after, MeshDimSet varying, Corner corner) {
  const int64_t replicas_after = layout_.mesh().group_size(varying - after.cut_dims);
  return corner_traffic_.exchange(before.lists, after.lists, varying, replicas_after, corner);
}

std::optional<StepCounts> MoveTable::counts_lower_bound(const State& before, const State& after, const Move& move) {
  if (move.op != StepOp::kExchange || closed_form(before, after)) return std::nullopt;
  StepCounts counts;
  counts.touched_bytes = after.elements * item_bytes_;
  raise_to(counts, exchange_traffic(before, after, move.mesh_dims & before.cut_dims, Corner()));
  return counts;
}

MoveTable::Distance MoveTable::distance(const State& before, const State& after) {
  Distance distance;
  // Every element with a pending reduction needs contributions of other ranks, whichever rank receives it.
  const MeshDimSet to_reduce = before.partial_dims - after.partial_dims;
  if (const std::optional<ClosedForm> form = closed_form(before, after)) {
    distance.missing_max = after.elements - (form->differs || !to_reduce.empty() ? 0 : form->shared);
    distance.missing_min = after.elements - (to_reduce.empty() ? form->shared : 0);
    // If some rank lacks its part, it may need all of another rank's part.
    distance.sources = form->sources == 1 && form->differs ? 2 : form->sources;
    distance.sources *= layout_.mesh().group_size(to_reduce);
    const bool lacks_all = form->differs_between_nodes || !(to_reduce & between_nodes_).empty();
    const int64_t missed_by_node = after.elements * form->needed_by_node - (lacks_all ? 0 : form->shared_by_node);
    distance.needs_other_nodes = missed_by_node > 0;
    distance.from_other_nodes = (missed_by_node + node_size_ - 1) / node_size_;
    return distance;
  }
  // Without a closed form, compares the parts of the ranks at the corners, or only the sizes if that takes long.
  if (takes_long(before, after)) {
    distance.missing_max = std::max<int64_t>(after.elements - before.elements, 0);
    return distance;
  }
  for (const Corner corner : lists_.corners().of(before.cut_dims | after.cut_dims)) {
    int64_t kept = 1;
    for (int t = 0; t < layout_.ndim(); ++t) {
      kept *= corner_traffic_.factors(t, before.lists[t], after.lists[t], {}, corner).kept;
    }
    distance.missing_max = std::max(distance.missing_max, corner_traffic_.elements(after.lists, corner) - kept);
  }
  for (int t = 0; t < layout_.ndim(); ++t) {
    const MeshDimSet varying = lists_.at(t, before.lists[t]).dims;
    distance.sources *=
        std::max<int64_t>(corner_traffic_.factors(t, before.lists[t], after.lists[t], varying, {}).sources, 1);
  }
  distance.sources *= layout_.mesh().group_size(to_reduce);
  if (!to_reduce.empty()) distance.missing_max = after.elements;
  return distance;
}

bool MoveTable::is_reduce_scatter(const State& before, const State& after, MeshDimSet reduced) {
  if (!(after.cut_dims - before.cut_dims == reduced) || !(before.cut_dims - after.cut_dims).empty()) return false;
  for (int t = 0; t < layout_.ndim(); ++t) {
    if (before.lists[t] != after.lists[t] && !pairs_.subdivides(t, before.lists[t], after.lists[t])) return false;
  }
  return true;
}

}  // namespace shardwright
