#include "planner/move_table.h"

#include <algorithm>

#include "layout/error.h"
#include "planner/exchange.h"
#include "planner/move.h"

namespace shardwright {
namespace {

constexpr int kMaxDimsWithAllCorners = 5;

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

void raise_to(StepFigures& worst, const Traffic& traffic) {
  worst.received_bytes = std::max(worst.received_bytes, traffic.received_bytes);
  worst.sent_bytes = std::max(worst.sent_bytes, traffic.sent_bytes);
  worst.messages = std::max(worst.messages, traffic.messages);
}

// The corners of a group: coordinates are first or last, which is where parts are largest and smallest and lie furthest
// from each other. All of them for a few mesh dims; for many, those where all coordinates but one agree.
std::vector<uint32_t> corners(MeshDimSet dims) {
  std::vector<uint32_t> found;
  if (dims.count() <= kMaxDimsWithAllCorners) {
    uint32_t subset = 0;
    do {
      found.push_back(subset);
      subset = (subset - dims.bits()) & dims.bits();
    } while (subset != 0);
    return found;
  }
  found = {0, dims.bits()};
  for (const int d : dims.to_vector()) {
    found.push_back(MeshDimSet::single(d).bits());
    found.push_back((dims - MeshDimSet::single(d)).bits());
  }
  return found;
}

}  // namespace

MoveTable::MoveTable(const Layout& layout, Backend backend, bool ordered)
    : layout_(layout),
      backend_(backend),
      ordered_(ordered),
      item_(layout.dtype().size_bytes()),
      lists_(layout.ndim()),
      numbers_(layout.ndim()) {}

int MoveTable::number(int tensor_dim, const std::vector<Cut>& cuts) {
  const int64_t n = layout_.shape()[tensor_dim];
  std::vector<Cut> list = canonical(layout_.mesh(), n, cuts);
  std::vector<int64_t> name;
  MeshDimSet dims;
  for (const Cut& c : list) {
    name.push_back(c.mesh_dim);
    name.push_back(c.split_factor);
    dims.insert(c.mesh_dim);
  }
  std::vector<List>& lists = lists_[tensor_dim];
  const auto [found, is_new] = numbers_[tensor_dim].emplace(std::move(name), static_cast<int>(lists.size()));
  if (is_new) {
    const int64_t first = length(part_at(layout_.mesh(), n, list, 0));
    lists.push_back({std::move(list), dims, first});
  }
  return found->second;
}

MoveTable::State MoveTable::state(const Cuts& cuts, MeshDimSet partial_dims) {
  State state{{}, {}, partial_dims, 1};
  for (int t = 0; t < layout_.ndim(); ++t) {
    const int list = number(t, cuts[t]);
    state.lists.push_back(list);
    state.cut_dims = state.cut_dims | dims_of(t, list);
    state.elements *= first_length(t, list);
  }
  return state;
}

Cuts MoveTable::cuts(const State& state) const {
  Cuts cuts;
  for (int t = 0; t < layout_.ndim(); ++t) cuts.push_back(lists_[t][state.lists[t]].cuts);
  return cuts;
}

std::optional<MoveTable::Move> MoveTable::move(const State& before, const State& after,
                                               const std::vector<MeshDimSet>& allowed) {
  if (!(after.partial_dims - before.partial_dims).empty() || before == after) return std::nullopt;
  const Mesh& mesh = layout_.mesh();
  const MeshDimSet reduced = before.partial_dims - after.partial_dims;
  if (!reduced.empty()) {
    const bool keeps = before.lists == after.lists;
    if (!keeps && !scatters(before, after, reduced)) return std::nullopt;
    if (!allowed_span(reduced, mesh, allowed, true)) return std::nullopt;
    return Move{keeps ? StepOp::kAllReduce : StepOp::kReduceScatter, reduced};
  }
  MeshDimSet dims;
  for (int t = 0; t < layout_.ndim(); ++t) {
    if (before.lists[t] != after.lists[t]) dims = dims | spanned(t, before.lists[t], after.lists[t]);
  }
  // Mesh dims that do not cut `before` bring nothing: ranks along them hold the same.
  dims = dims & before.cut_dims;
  if (dims.empty() || layout_.num_elements() == 0) {
    const MeshDimSet changed = (after.cut_dims - before.cut_dims) | (before.cut_dims - after.cut_dims);
    return Move{StepOp::kSlice, changed.empty() ? after.cut_dims : changed};
  }
  const std::optional<MeshDimSet> span = allowed_span(dims, mesh, allowed, false);
  if (!span) return std::nullopt;
  return Move{StepOp::kExchange, *span};
}

bool MoveTable::may_be_slice(const State& before, const State& after) const {
  if (!(before.partial_dims == after.partial_dims) || before.cut_dims == after.cut_dims) return false;
  for (int t = 0; t < layout_.ndim(); ++t) {
    const MeshDimSet lost = dims_of(t, before.lists[t]) - dims_of(t, after.lists[t]);
    if (!lost.empty()) return false;
  }
  return true;
}

StepFigures MoveTable::figures(const State& before, const State& after, const Move& move) {
  StepFigures worst;
  worst.touched_bytes = after.elements * item_;
  if (is_local(move.op)) return worst;
  const int64_t k = layout_.mesh().group_size(move.mesh_dims);
  if (move.op == StepOp::kAllReduce) {
    const bool native = !ordered_ && reduces_natively(layout_, move.mesh_dims, backend_);
    raise_to(worst, all_reduce_traffic(before.elements, k, 0, item_, native));
    return worst;
  }
  const MeshDimSet varying = move.mesh_dims & before.cut_dims;
  const int64_t receivers = layout_.mesh().group_size(varying - after.cut_dims);
  for (const uint32_t corner : corners(move.mesh_dims)) {
    const int64_t needed = elements_at(after, corner);
    if (move.op == StepOp::kReduceScatter) {
      raise_to(worst, reduce_scatter_traffic(elements_at(before, corner), needed, k, item_));
      continue;
    }
    Shares all{1, 1, receivers};
    for (int t = 0; t < layout_.ndim(); ++t) {
      const Shares& one = shares(t, before.lists[t], after.lists[t], varying, corner);
      all = {all.own * one.own, all.sources * one.sources, all.sent * one.sent};
    }
    raise_to(worst, {(needed - all.own) * item_, (all.sent - all.own) * item_, all.sources - (all.own > 0 ? 1 : 0)});
  }
  return worst;
}

int64_t MoveTable::missing(const State& before, const State& after) {
  int64_t worst = 0;
  for (const uint32_t corner : corners(before.cut_dims | after.cut_dims)) {
    int64_t own = 1;
    for (int t = 0; t < layout_.ndim(); ++t) own *= shares(t, before.lists[t], after.lists[t], {}, corner).own;
    worst = std::max(worst, elements_at(after, corner) - own);
  }
  return worst;
}

bool MoveTable::scatters(const State& before, const State& after, MeshDimSet reduced) {
  if (!(after.cut_dims - before.cut_dims == reduced) || !(before.cut_dims - after.cut_dims).empty()) return false;
  for (int t = 0; t < layout_.ndim(); ++t) {
    if (before.lists[t] != after.lists[t] && !is_cut_further(t, before.lists[t], after.lists[t])) return false;
  }
  return true;
}

bool MoveTable::is_cut_further(int tensor_dim, int before, int after) {
  const auto [found, is_new] = cut_further_.emplace(key(tensor_dim, before, after), false);
  if (is_new) {
    const MeshDimSet kept = dims_of(tensor_dim, before);
    found->second = (kept - dims_of(tensor_dim, after)).empty() &&
                    holds_the_same(layout_.mesh(), layout_.shape()[tensor_dim], lists_[tensor_dim][before].cuts,
                                   lists_[tensor_dim][after].cuts, kept);
  }
  return found->second;
}

MeshDimSet MoveTable::spanned(int tensor_dim, int before, int after) {
  const auto [found, is_new] = spanned_.emplace(key(tensor_dim, before, after), MeshDimSet());
  if (is_new) {
    found->second = spanned_dims(layout_.mesh(), layout_.shape()[tensor_dim], lists_[tensor_dim][before].cuts,
                                 lists_[tensor_dim][after].cuts);
  }
  return found->second;
}

const MoveTable::Shares& MoveTable::shares(int tensor_dim, int before, int after, MeshDimSet varying, uint32_t corner) {
  const MeshDimSet relevant = dims_of(tensor_dim, before) | dims_of(tensor_dim, after);
  varying = varying & relevant;
  corner &= relevant.bits();
  const auto [found, is_new] = shares_.emplace(key(tensor_dim, before, after, varying.bits(), corner), Shares());
  if (is_new) {
    const Mesh& mesh = layout_.mesh();
    const int64_t n = layout_.shape()[tensor_dim];
    const int64_t position = position_of(corner);
    const std::vector<Cut>& a = lists_[tensor_dim][before].cuts;
    const std::vector<Cut>& b = lists_[tensor_dim][after].cuts;
    const IntervalList held = part_at(mesh, n, a, position);
    const IntervalList needed = part_at(mesh, n, b, position);
    found->second = {intersection_length(held, needed), meet(mesh, n, a, position, varying, needed).parts,
                     meet(mesh, n, b, position, varying, held).elements};
  }
  return found->second;
}

int64_t MoveTable::length_at(int tensor_dim, int list, uint32_t corner) {
  corner &= dims_of(tensor_dim, list).bits();
  if (corner == 0) return first_length(tensor_dim, list);
  const auto [found, is_new] = lengths_.emplace(key(tensor_dim, list, 0, 0, corner), 0);
  if (is_new) {
    found->second = length(
        part_at(layout_.mesh(), layout_.shape()[tensor_dim], lists_[tensor_dim][list].cuts, position_of(corner)));
  }
  return found->second;
}

int64_t MoveTable::elements_at(const State& state, uint32_t corner) {
  int64_t total = 1;
  for (int t = 0; t < layout_.ndim(); ++t) total *= length_at(t, state.lists[t], corner);
  return total;
}

int64_t MoveTable::position_of(uint32_t corner) const {
  const Mesh& mesh = layout_.mesh();
  int64_t position = 0;
  for (const int d : MeshDimSet::from_bits(corner).to_vector()) position += (mesh.dim_size(d) - 1) * mesh.stride(d);
  return position;
}

MoveTable::Key MoveTable::key(int tensor_dim, int before, int after, uint32_t varying, uint32_t corner) {
  return {static_cast<uint32_t>(tensor_dim), static_cast<uint32_t>(before), static_cast<uint32_t>(after), varying,
          corner};
}

size_t MoveTable::KeyHash::operator()(const Key& key) const {
  uint64_t hash = 0;
  for (const uint32_t part : key) hash = (hash ^ part) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 32);
}

}  // namespace shardwright
