#include "moves/move_table.h"

#include <algorithm>

#include "exchange/axis_overlap.h"
#include "exchange/mesh_exchange.h"
#include "moves/collectives.h"
#include "moves/spans.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Maximum number of pieces, over all ranks, that are compared for strided parts without digits.
constexpr int64_t kMaxPiecesCompared = 4096;

// Returns the smallest set in `allowed` (empty: any) that includes `needed`, or with `exactly` equals it.
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
      item_bytes_(layout.dtype().size_bytes()),
      corners_(layout_.mesh()),
      lists_(layout.ndim()),
      list_indices_(layout.ndim()),
      pair_indices_(layout.ndim()) {}

// Known lists are found by their digits, or without digits by their canonical form (moves/spans.h).
int MoveTable::list_index(int tensor_dim, const std::vector<Cut>& cuts) {
  const int64_t n = layout_.shape()[tensor_dim];
  std::vector<List>& lists = lists_[tensor_dim];
  List list{cuts, shardwright::dims_of(cuts), n, false, digits_of(layout_.mesh(), n, cuts)};
  list.has_equal_parts = list.digits || cuts_evenly(layout_.mesh(), n, cuts);
  const auto next = static_cast<int>(lists.size());
  if (list.digits) {
    for (int i = 0; i < next; ++i) {
      if (lists[i].dims == list.dims && lists[i].digits == list.digits) return i;
    }
    for (const Digit& digit : *list.digits) list.length /= digit.radix;
  } else {
    list.cuts = canonical(layout_.mesh(), n, std::move(list.cuts));
    std::vector<int64_t> encoding;
    for (const Cut& c : list.cuts) {
      encoding.push_back(c.mesh_dim);
      c.rule.append_encoding(encoding);
    }
    const auto [found, is_new] = list_indices_[tensor_dim].emplace(std::move(encoding), next);
    if (!is_new) return found->second;
    list.first_is_largest =
        std::all_of(list.cuts.begin(), list.cuts.end(), [](const Cut& c) { return c.rule.descends(); });
    corners_.add(n, list.cuts);
    const int64_t largest = list.first_is_largest ? 0 : largest_position(layout_.mesh(), n, list.cuts);
    list.length = length(part_at(layout_.mesh(), n, list.cuts, largest));
  }
  lists.push_back(std::move(list));
  return next;
}

MoveTable::State MoveTable::state(const Cuts& cuts, MeshDimSet partial_dims) {
  State state{{}, {}, partial_dims, 1};
  for (int t = 0; t < layout_.ndim(); ++t) {
    const int list = list_index(t, cuts[t]);
    state.lists.push_back(list);
    state.cut_dims = state.cut_dims | dims_of(t, list);
    state.elements *= largest_length(t, list);
  }
  return state;
}

Cuts MoveTable::cuts(const State& state) const {
  Cuts cuts;
  for (int t = 0; t < layout_.ndim(); ++t) {
    cuts.push_back(canonical(layout_.mesh(), layout_.shape()[t], lists_[t][state.lists[t]].cuts));
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
    if (before.lists[t] != after.lists[t]) dims = dims | pair_of(t, before.lists[t], after.lists[t]).spanned;
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
    const ListPair& pair = pair_of(t, before.lists[t], after.lists[t]);
    if (!pair.has_closed_form) return std::nullopt;
    for (int i = 0; i < pair.num_ties; ++i) {
      if (!before.cut_dims.contains(pair.ties[i].mesh_dim)) replicas.insert(pair.ties[i].mesh_dim);
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
    if (pair_of(t, before.lists[t], after.lists[t]).takes_long) return true;
  }
  return false;
}

int64_t MoveTable::num_pieces(int64_t n, const List& list) const {
  int64_t count = 1;
  bool is_strided = false;
  for (const Cut& c : list.cuts) {
    const int64_t k = layout_.mesh().dim_size(c.mesh_dim);
    is_strided = is_strided || !c.rule.makes_runs();
    count = saturating_product(count, saturating_product(c.rule.runs(n, k), k));
  }
  return is_strided ? count : 1;
}

bool MoveTable::may_be_slice(const State& before, const State& after) const {
  if (!(before.partial_dims == after.partial_dims) || before.cut_dims == after.cut_dims) return false;
  for (int t = 0; t < layout_.ndim(); ++t) {
    const MeshDimSet lost = dims_of(t, before.lists[t]) - dims_of(t, after.lists[t]);
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
    for (const Corner corner : corners_.of(has_equal_parts(after) ? MeshDimSet() : move.mesh_dims)) {
      raise_to(maxima, reduce_scatter_traffic(elements_at(before, corner), elements_at(after, corner), k, item_bytes_));
    }
    return maxima;
  }
  StepCounts exchange = exchange_counts(before, after, move);
  exchange.touched_bytes = maxima.touched_bytes;
  return exchange;
}

bool MoveTable::has_equal_parts(const State& state) const {
  for (int t = 0; t < layout_.ndim(); ++t) {
    if (!has_equal_parts(t, state.lists[t])) return false;
  }
  return true;
}

StepCounts MoveTable::exchange_counts(const State& before, const State& after, const Move& move) {
  // With a closed form, a rank sends as much as it receives, with one exception: a tie whose mesh dim did not cut
  // before. Along this mesh dim, only the replica with the matching coordinate sends, so it sends more.
  bool differs = false;
  bool sender_differs = false;
  int64_t shared = 1;
  int64_t sources = 1;
  int64_t fan_out = 1;  // number of receivers of the busiest sender, per source of a receiver
  bool has_closed_form = true;
  for (int t = 0; t < layout_.ndim() && has_closed_form; ++t) {
    const ListPair& pair = pair_of(t, before.lists[t], after.lists[t]);
    has_closed_form = pair.has_closed_form;
    differs = differs || pair.differs;
    shared *= pair.shared;
    sources *= pair.sources;
    for (int i = 0; i < pair.num_ties; ++i) {
      if (before.cut_dims.contains(pair.ties[i].mesh_dim)) {
        sender_differs = true;
      } else {
        fan_out *= pair.ties[i].radix;
      }
    }
  }
  if (has_closed_form && move.policy == ReplicaPolicy::kWholeMessages) {
    // When replicas share messages, a receiver's messages are one range, or one range for each of its sources.
    return {after.elements * item_bytes_, after.elements * item_bytes_, sources, 0, 1, sources};
  }
  if (has_closed_form) {
    const int64_t sent = after.elements * fan_out;
    const int64_t receivers = fan_out * sources;
    return {(after.elements - (differs ? 0 : shared)) * item_bytes_,
            (sent - (sender_differs ? 0 : shared)) * item_bytes_,
            sources - (differs ? 0 : 1),
            0,
            1,
            receivers - (sender_differs ? 0 : 1)};
  }
  StepCounts maxima;
  const MeshDimSet varying = move.mesh_dims & before.cut_dims;
  for (const Corner corner : corners_.of(move.mesh_dims)) {
    raise_to(maxima, exchange_traffic(before, after, varying, corner));
  }
  if (maxima.messages > 0) return maxima;
  // Nothing moves at these corners, because parts are very small. Data moves in other groups, or between inner
  // ranks.
  for (const Corner corner : corners_.of(before.cut_dims | after.cut_dims | move.mesh_dims)) {
    raise_to(maxima, exchange_traffic(before, after, varying, corner));
  }
  if (maxima.messages == 0) raise_to(maxima, {item_bytes_, item_bytes_, 1, 1});
  return maxima;
}

Traffic MoveTable::exchange_traffic(const State& before, const State& after, MeshDimSet varying, Corner corner) {
  const int64_t replicas_after = layout_.mesh().group_size(varying - after.cut_dims);
  DimTraffic all{1, 1, replicas_after, replicas_after};
  for (int t = 0; t < layout_.ndim(); ++t) {
    const DimTraffic& factors = dim_traffic(t, before.lists[t], after.lists[t], varying, corner);
    all = {all.kept * factors.kept, all.sources * factors.sources, all.sent * factors.sent,
           all.receivers * factors.receivers};
  }
  const int64_t itself = all.kept > 0 ? 1 : 0;
  return {(elements_at(after, corner) - all.kept) * item_bytes_, (all.sent - all.kept) * item_bytes_,
          all.sources - itself, all.receivers - itself};
}

std::optional<StepCounts> MoveTable::counts_lower_bound(const State& before, const State& after, const Move& move) {
  if (move.op != StepOp::kExchange) return std::nullopt;
  bool has_closed_form = true;
  for (int t = 0; t < layout_.ndim() && has_closed_form; ++t)
    has_closed_form = pair_of(t, before.lists[t], after.lists[t]).has_closed_form;
  if (has_closed_form) return std::nullopt;
  StepCounts counts;
  counts.touched_bytes = after.elements * item_bytes_;
  raise_to(counts, exchange_traffic(before, after, move.mesh_dims & before.cut_dims, Corner()));
  return counts;
}

MoveTable::Distance MoveTable::distance(const State& before, const State& after) {
  Distance distance;
  bool has_closed_form = true;
  bool differs = false;
  bool differs_between_nodes = false;
  int64_t shared = 1;
  int64_t shared_by_node = 1;
  int64_t needed_by_node = after.elements;
  for (int t = 0; t < layout_.ndim() && has_closed_form; ++t) {
    const ListPair& pair = pair_of(t, before.lists[t], after.lists[t]);
    has_closed_form = pair.has_closed_form;
    differs = differs || pair.differs;
    differs_between_nodes = differs_between_nodes || pair.differs_between_nodes;
    shared *= pair.shared;
    shared_by_node *= pair.shared_by_node;
    needed_by_node *= pair.needed_by_node;
    distance.sources *= pair.sources;
  }
  // Every element with a pending reduction needs contributions of other ranks, whichever rank receives it.
  const MeshDimSet to_reduce = before.partial_dims - after.partial_dims;
  if (has_closed_form) {
    distance.missing_max = after.elements - (differs || !to_reduce.empty() ? 0 : shared);
    distance.missing_min = after.elements - (to_reduce.empty() ? shared : 0);
    if (distance.sources == 1 && differs) distance.sources = 2;  // a rank may need all of another rank's part
    distance.sources *= layout_.mesh().group_size(to_reduce);
    const bool lacks_all = differs_between_nodes || !(to_reduce & between_nodes_).empty();
    const int64_t missed_by_node = needed_by_node - (lacks_all ? 0 : shared_by_node);
    distance.needs_other_nodes = missed_by_node > 0;
    distance.from_other_nodes = (missed_by_node + node_size_ - 1) / node_size_;
    return distance;
  }
  // Without a closed form, compares the parts of the ranks at the corners, or only the sizes if that takes long.
  distance = Distance();
  if (takes_long(before, after)) {
    distance.missing_max = std::max<int64_t>(after.elements - before.elements, 0);
    return distance;
  }
  for (const Corner corner : corners_.of(before.cut_dims | after.cut_dims)) {
    int64_t kept = 1;
    for (int t = 0; t < layout_.ndim(); ++t) kept *= dim_traffic(t, before.lists[t], after.lists[t], {}, corner).kept;
    distance.missing_max = std::max(distance.missing_max, elements_at(after, corner) - kept);
  }
  for (int t = 0; t < layout_.ndim(); ++t) {
    distance.sources *=
        std::max<int64_t>(dim_traffic(t, before.lists[t], after.lists[t], dims_of(t, before.lists[t]), {}).sources, 1);
  }
  distance.sources *= layout_.mesh().group_size(to_reduce);
  if (!to_reduce.empty()) distance.missing_max = after.elements;
  return distance;
}

bool MoveTable::is_reduce_scatter(const State& before, const State& after, MeshDimSet reduced) {
  if (!(after.cut_dims - before.cut_dims == reduced) || !(before.cut_dims - after.cut_dims).empty()) return false;
  for (int t = 0; t < layout_.ndim(); ++t) {
    if (before.lists[t] != after.lists[t] && !subdivides(t, before.lists[t], after.lists[t])) return false;
  }
  return true;
}

const MoveTable::ListPair& MoveTable::pair_of(int tensor_dim, int before, int after) {
  std::vector<std::vector<int>>& rows = pair_indices_[tensor_dim];
  if (static_cast<size_t>(before) >= rows.size()) rows.resize(lists_[tensor_dim].size());
  std::vector<int>& row = rows[before];
  if (static_cast<size_t>(after) >= row.size()) row.resize(lists_[tensor_dim].size(), -1);
  if (row[after] < 0) {
    row[after] = static_cast<int>(pairs_.size());
    pairs_.push_back(compute_pair(tensor_dim, lists_[tensor_dim][before], lists_[tensor_dim][after]));
  }
  return pairs_[row[after]];
}

MoveTable::ListPair MoveTable::compute_pair(int tensor_dim, const List& before, const List& after) const {
  const Mesh& mesh = layout_.mesh();
  const int64_t n = layout_.shape()[tensor_dim];
  ListPair pair;
  if (before.digits && after.digits) {
    if (const std::optional<Matching> matching = Matching::of(n, *before.digits, *after.digits)) {
      const auto has = [](const List& list, const Digit& digit) {
        return std::find(list.digits->begin(), list.digits->end(), digit) != list.digits->end();
      };
      pair.subdivides = true;
      for (const Digit& digit : *before.digits) {
        if (has(after, digit)) continue;
        pair.spanned.insert(digit.mesh_dim);
        pair.subdivides = false;
      }
      for (const Digit& digit : *after.digits) {
        if (!has(before, digit)) pair.spanned.insert(digit.mesh_dim);
      }
      set_closed_form(pair, *matching);
      return pair;
    }
  }
  pair.takes_long = std::max(num_pieces(n, before), num_pieces(n, after)) > kMaxPiecesCompared;
  pair.spanned = spanned_dims(mesh, n, before.cuts, after.cuts);
  return pair;
}

bool MoveTable::subdivides(int tensor_dim, int before, int after) {
  const std::optional<bool> known = pair_of(tensor_dim, before, after).subdivides;
  if (known) return *known;
  const List& a = lists_[tensor_dim][before];
  const List& b = lists_[tensor_dim][after];
  const bool subdivides = (a.dims - b.dims).empty() &&
                          hold_same_elements(layout_.mesh(), layout_.shape()[tensor_dim], a.cuts, b.cuts, a.dims);
  pairs_[pair_indices_[tensor_dim][before][after]].subdivides = subdivides;
  return subdivides;
}

void MoveTable::set_closed_form(ListPair& pair, const Matching& matching) const {
  pair.shared = pair.shared_by_node = matching.elements_per_overlap();
  pair.sources = matching.sources();
  for (const Matching::Common& digit : matching.digits()) {
    const int from = digit.before.mesh_dim;
    const int to = digit.after.mesh_dim;
    const bool is_between_before = from >= 0 && between_nodes_.contains(from);
    const bool is_between_after = to >= 0 && between_nodes_.contains(to);
    if (from >= 0 && to >= 0 && !(digit.before == digit.after)) {
      if (pair.num_ties == ListPair::kMaxTies) return;
      pair.ties[pair.num_ties++] = {to, digit.radix};
      pair.differs = true;
      if (is_between_before && is_between_after) pair.differs_between_nodes = true;
    }
    if (!is_between_before && !is_between_after) pair.shared_by_node *= digit.radix;
    if (to >= 0 && !is_between_after) pair.needed_by_node *= digit.radix;
  }
  pair.has_closed_form = true;
}

const MoveTable::DimTraffic& MoveTable::dim_traffic(int tensor_dim, int before, int after, MeshDimSet varying,
                                                    Corner corner) {
  const MeshDimSet relevant = dims_of(tensor_dim, before) | dims_of(tensor_dim, after);
  varying = varying & relevant;
  corner = corners_.projected(corner, relevant);
  const auto [found, is_new] = dim_traffic_.try_emplace(key(tensor_dim, before, after, varying.bits(), corner));
  if (is_new) {
    const List& a = lists_[tensor_dim][before];
    const List& b = lists_[tensor_dim][after];
    const int64_t n = layout_.shape()[tensor_dim];
    const int64_t position = corners_.position(corner);
    std::optional<Matching> matching;
    if (a.digits && b.digits) matching = Matching::of(n, *a.digits, *b.digits);
    found->second = matching ? dim_traffic_by_digits(*matching, varying, position)
                             : dim_traffic_by_parts(n, a.cuts, b.cuts, varying, position);
  }
  return found->second;
}

MoveTable::DimTraffic MoveTable::dim_traffic_by_digits(const Matching& matching, MeshDimSet varying,
                                                       int64_t position) const {
  const auto varies = [&](const Matching::Owner& owner) { return varying.contains(owner.mesh_dim); };
  DimTraffic factors{matching.elements_per_overlap(), 1, matching.elements_per_overlap(), 1};
  for (const Matching::Common& digit : matching.digits()) {
    const bool agrees = digit.agrees_at(layout_.mesh(), position);
    if (!agrees) factors.kept = 0;
    if (digit.after.mesh_dim < 0) {
      if (varies(digit.before)) factors.sources *= digit.radix;
    } else if (digit.before.mesh_dim < 0) {
      if (varies(digit.after)) {
        factors.sent *= digit.radix;
        factors.receivers *= digit.radix;
      }
    } else if (!agrees) {
      if (!varies(digit.before)) factors.sources = 0;
      if (!varies(digit.after)) factors.sent = factors.receivers = 0;
    }
  }
  return factors;
}

MoveTable::DimTraffic MoveTable::dim_traffic_by_parts(int64_t n, const std::vector<Cut>& before,
                                                      const std::vector<Cut>& after, MeshDimSet varying,
                                                      int64_t position) const {
  const Mesh& mesh = layout_.mesh();
  const IntervalList held = part_at(mesh, n, before, position);
  const IntervalList needed = part_at(mesh, n, after, position);
  const AxisOverlap receivers = overlap(mesh, n, after, position, varying, held);
  return {intersection_length(held, needed), overlap(mesh, n, before, position, varying, needed).parts,
          receivers.elements, receivers.parts};
}

int64_t MoveTable::length_at(int tensor_dim, int list, Corner corner) {
  corner = corners_.projected(corner, dims_of(tensor_dim, list));
  if (corner.last == 0 && corner.base == 0 && lists_[tensor_dim][list].first_is_largest) {
    return largest_length(tensor_dim, list);
  }
  const auto [found, is_new] = lengths_.try_emplace(key(tensor_dim, list, 0, 0, corner), 0);
  if (is_new) {
    found->second = length(
        part_at(layout_.mesh(), layout_.shape()[tensor_dim], lists_[tensor_dim][list].cuts, corners_.position(corner)));
  }
  return found->second;
}

int64_t MoveTable::elements_at(const State& state, Corner corner) {
  int64_t total = 1;
  for (int t = 0; t < layout_.ndim(); ++t) total *= length_at(t, state.lists[t], corner);
  return total;
}

MoveTable::Key MoveTable::key(int tensor_dim, int before, int after, uint32_t varying, Corner corner) {
  return {static_cast<uint32_t>(tensor_dim),
          static_cast<uint32_t>(before),
          static_cast<uint32_t>(after),
          varying,
          corner.last,
          corner.base};
}

size_t MoveTable::KeyHash::operator()(const Key& key) const {
  uint64_t hash = 0;
  for (const uint32_t part : key) hash = (hash ^ part) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 32);
}

}  // namespace shardwright
