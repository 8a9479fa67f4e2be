#include "moves/corner_traffic.h"

#include "exchange/axis_overlap.h"

namespace shardwright {

Traffic CornerTraffic::exchange(const std::vector<int>& before, const std::vector<int>& after, MeshDimSet varying,
                                int64_t replicas_after, Corner corner) {
  Factors all{1, 1, replicas_after, replicas_after};
  for (int t = 0; t < layout_.ndim(); ++t) {
    const Factors& of_dim = factors(t, before[t], after[t], varying, corner);
    all = {all.kept * of_dim.kept, all.sources * of_dim.sources, all.sent * of_dim.sent,
           all.receivers * of_dim.receivers};
  }
  const int64_t itself = all.kept > 0 ? 1 : 0;
  const int64_t item = layout_.dtype().size_bytes();
  return {(elements(after, corner) - all.kept) * item, (all.sent - all.kept) * item, all.sources - itself,
          all.receivers - itself};
}

const CornerTraffic::Factors& CornerTraffic::factors(int tensor_dim, int before, int after, MeshDimSet varying,
                                                     Corner corner) {
  const CutList& a = lists_.at(tensor_dim, before);
  const CutList& b = lists_.at(tensor_dim, after);
  varying = varying & (a.dims | b.dims);
  corner = lists_.corners().projected(corner, a.dims | b.dims);
  const auto [found, is_new] = factors_.try_emplace(key(tensor_dim, before, after, varying.bits(), corner));
  if (is_new) {
    const int64_t n = layout_.shape()[tensor_dim];
    const int64_t position = lists_.corners().position(corner);
    std::optional<Matching> matching;
    if (a.digits && b.digits) matching = Matching::of(n, *a.digits, *b.digits);
    found->second = matching ? factors_by_digits(*matching, varying, position)
                             : factors_by_parts(n, a.cuts, b.cuts, varying, position);
  }
  return found->second;
}

CornerTraffic::Factors CornerTraffic::factors_by_digits(const Matching& matching, MeshDimSet varying,
                                                        int64_t position) const {
  const auto varies = [&](const Matching::Owner& owner) { return varying.contains(owner.mesh_dim); };
  Factors factors{matching.elements_per_overlap(), 1, matching.elements_per_overlap(), 1};
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

CornerTraffic::Factors CornerTraffic::factors_by_parts(int64_t n, const std::vector<Cut>& before,
                                                       const std::vector<Cut>& after, MeshDimSet varying,
                                                       int64_t position) const {
  const Mesh& mesh = layout_.mesh();
  const IntervalList held = part_at(mesh, n, before, position);
  const IntervalList needed = part_at(mesh, n, after, position);
  const AxisOverlap receivers = overlap(mesh, n, after, position, varying, held);
  return {intersection_length(held, needed), overlap(mesh, n, before, position, varying, needed).parts,
          receivers.elements, receivers.parts};
}

int64_t CornerTraffic::length(int tensor_dim, int list, Corner corner) {
  const CutList& cuts = lists_.at(tensor_dim, list);
  corner = lists_.corners().projected(corner, cuts.dims);
  if (corner.last == 0 && corner.base == 0 && cuts.first_is_largest) return cuts.length;
  const auto [found, is_new] = lengths_.try_emplace(key(tensor_dim, list, 0, 0, corner), 0);
  if (is_new) {
    found->second = shardwright::length(
        part_at(layout_.mesh(), layout_.shape()[tensor_dim], cuts.cuts, lists_.corners().position(corner)));
  }
  return found->second;
}

int64_t CornerTraffic::elements(const std::vector<int>& lists, Corner corner) {
  int64_t total = 1;
  for (int t = 0; t < layout_.ndim(); ++t) total *= length(t, lists[t], corner);
  return total;
}

CornerTraffic::Key CornerTraffic::key(int tensor_dim, int before, int after, uint32_t varying, Corner corner) {
  return {static_cast<uint32_t>(tensor_dim),
          static_cast<uint32_t>(before),
          static_cast<uint32_t>(after),
          varying,
          corner.last,
          corner.base};
}

size_t CornerTraffic::KeyHash::operator()(const Key& key) const {
  uint64_t hash = 0;
  for (const uint32_t part : key) hash = (hash ^ part) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 32);
}

}  // namespace shardwright
