#include "exchange/axis_overlap.h"

#include <algorithm>

namespace shardwright {
namespace {

// Calls visit(length, count) for the parts into which cuts divide a list of n elements, with `times` as a factor of
// each count. Parts of equal length may be counted together, and empty parts are left out. `varying` and `position`
// have the meaning that they have in overlap().
template <typename Visit>
void for_each_part(const Mesh& mesh, int64_t position, MeshDimSet varying, int64_t n, std::span<const Cut> cuts,
                   int64_t times, const Visit& visit) {
  if (n == 0 || times == 0) return;
  if (cuts.empty()) return visit(n, times);
  const Cut& first = cuts[0];
  const int64_t k = mesh.dim_size(first.mesh_dim);
  const auto divide_further = [&](int64_t length, int64_t parts) {
    for_each_part(mesh, position, varying, length, cuts.subspan(1), times * parts, visit);
  };
  if (!varying.contains(first.mesh_dim)) {
    return divide_further(first.rule.length(n, k, mesh.coordinate(position, first.mesh_dim)), 1);
  }
  if (first.rule.is_chunks()) {
    const int64_t chunk = (n + k - 1) / k;
    const int64_t full = n / chunk;
    divide_further(chunk, full);
    return divide_further(n - full * chunk, 1);
  }
  std::map<int64_t, int64_t> parts;
  for (int64_t c = 0; c < k; ++c) ++parts[first.rule.length(n, k, c)];
  for (const auto& [length, count] : parts) divide_further(length, count);
}

// Calls visit(elements, times) for the overlaps of a list's parts with a target. List and target are single intervals,
// and all cuts are chunks, so all parts are single intervals. Only the first and the last chunk that intersect the
// target are visited by themselves: the chunks between them are full and entirely in the target.
template <typename Visit>
void for_each_overlap_in_runs(const Mesh& mesh, int64_t position, MeshDimSet varying, Interval list,
                              std::span<const Cut> cuts, Interval target, const Visit& visit) {
  const Interval shared{std::max(list.begin, target.begin), std::min(list.end, target.end)};
  if (shared.begin >= shared.end) return;
  const int64_t n = list.end - list.begin;
  if (shared == list) return for_each_part(mesh, position, varying, n, cuts, 1, visit);
  if (cuts.empty()) return visit(shared.end - shared.begin, int64_t{1});
  const int64_t k = mesh.dim_size(cuts[0].mesh_dim);
  const int64_t chunk = (n + k - 1) / k;
  const auto visit_chunk = [&](int64_t c) {
    const Interval part{std::min(list.begin + c * chunk, list.end), std::min(list.begin + (c + 1) * chunk, list.end)};
    for_each_overlap_in_runs(mesh, position, varying, part, cuts.subspan(1), target, visit);
  };
  if (!varying.contains(cuts[0].mesh_dim)) return visit_chunk(mesh.coordinate(position, cuts[0].mesh_dim));
  const int64_t first = (shared.begin - list.begin) / chunk;
  const int64_t last = (shared.end - 1 - list.begin) / chunk;
  visit_chunk(first);
  for_each_part(mesh, position, varying, chunk, cuts.subspan(1), std::max<int64_t>(last - first - 1, 0), visit);
  if (last > first) visit_chunk(last);
}

// Divides the interval `list` by one cut, and calls visit(elements, times) for the overlaps of a target with the parts
// at these coordinates, without listing the parts. The target must intersect the interval. Handles chunks with any
// target that has no repeats, and strided parts with a target of a single interval. Otherwise returns false without a
// visit.
template <typename Visit>
bool visit_parts_of_one_cut(int64_t k, Interval coordinates, Interval list, const CutRule& rule,
                            const IntervalList& target, const Visit& visit) {
  const auto common_length = [](int64_t begin, int64_t end, Interval range) {
    return std::max<int64_t>(std::min(end, range.end) - std::max(begin, range.begin), 0);
  };
  const int64_t n = list.end - list.begin;
  if (rule.is_chunks() && !target.has_repeats()) {
    const int64_t chunk = (n + k - 1) / k;
    auto at = target.stored().begin();
    const auto end = target.stored().end();
    for (int64_t c = coordinates.begin; c < coordinates.end; ++c) {
      const Interval part{list.begin + c * chunk, std::min(list.begin + (c + 1) * chunk, list.end)};
      while (at != end && at->end <= part.begin) ++at;
      int64_t shared = 0;
      for (auto other = at; other != end && other->begin < part.end; ++other) {
        shared += common_length(other->begin, other->end, part);
      }
      if (shared > 0) visit(shared, int64_t{1});
    }
    return true;
  }
  if (!rule.is_strided_or_chunks() || target.size() != 1) return false;
  // A strided cut divides the list into pieces, and each piece among the coordinates. The target covers consecutive
  // pieces, the first and the last possibly in part. All pieces between these two are equally long.
  const Interval range{std::max(target[0].begin, list.begin) - list.begin,
                       std::min(target[0].end, list.end) - list.begin};
  const int64_t piece = (n + rule.split_factor() - 1) / rule.split_factor();
  // Returns the number of elements of a piece that a coordinate gets and the target has.
  const auto shared_in_piece = [&](int64_t index, int64_t c) {
    const int64_t begin = index * piece;
    const int64_t length = std::min(piece, n - begin);
    const int64_t chunk = (length + k - 1) / k;
    return common_length(begin + std::min(c * chunk, length), begin + std::min((c + 1) * chunk, length), range);
  };
  const int64_t first = range.begin / piece;
  const int64_t last = (range.end - 1) / piece;
  for (int64_t c = coordinates.begin; c < coordinates.end; ++c) {
    int64_t shared = shared_in_piece(first, c);
    if (last > first) shared += shared_in_piece(last, c);
    if (last > first + 1) shared += (last - first - 1) * shared_in_piece(first + 1, c);
    if (shared > 0) visit(shared, int64_t{1});
  }
  return true;
}

// Calls visit(elements, times) for the overlaps of any list's parts with any target. Uses the special cases above where
// they apply; otherwise makes the part of each coordinate and continues with the next cut.
template <typename Visit>
void for_each_overlap_in(const Mesh& mesh, int64_t position, MeshDimSet varying, const IntervalList& list,
                         std::span<const Cut> cuts, const IntervalList& target, const Visit& visit) {
  const auto is_chunks = [](const Cut& c) { return c.rule.is_chunks(); };
  if (list.size() == 1 && target.size() == 1 && std::all_of(cuts.begin(), cuts.end(), is_chunks)) {
    return for_each_overlap_in_runs(mesh, position, varying, list[0], cuts, target[0], visit);
  }
  const SharedRuns shared = shared_runs(list, target);
  if (shared.length == 0) return;
  const int64_t n = length(list);
  if (shared.length == n) return for_each_part(mesh, position, varying, n, cuts, 1, visit);
  if (cuts.empty()) return visit(shared.length, int64_t{1});
  const Cut& first = cuts[0];
  const int64_t k = mesh.dim_size(first.mesh_dim);
  if (list.size() == 1 && cuts.size() == 1) {
    const int64_t own = mesh.coordinate(position, first.mesh_dim);
    const Interval coordinates = varying.contains(first.mesh_dim) ? Interval{0, k} : Interval{own, own + 1};
    if (visit_parts_of_one_cut(k, coordinates, list[0], first.rule, target, visit)) return;
  }
  if (!varying.contains(first.mesh_dim)) {
    const IntervalList part = first.rule.part(list, k, mesh.coordinate(position, first.mesh_dim));
    return for_each_overlap_in(mesh, position, varying, part, cuts.subspan(1), target, visit);
  }
  Interval coordinates{0, k};
  if (first.rule.makes_runs()) {  // only the coordinates with positions from the first to the last shared element
    const int64_t end_position = intersection_length(list, {{0, target.back().end}});
    coordinates = first.rule.coordinates_of({shared.a_position, end_position}, n, k);
  }
  for (int64_t c = coordinates.begin; c < coordinates.end; ++c) {
    for_each_overlap_in(mesh, position, varying, first.rule.part(list, k, c), cuts.subspan(1), target, visit);
  }
}

}  // namespace

AxisOverlap overlap(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position, MeshDimSet varying,
                    const IntervalList& target) {
  AxisOverlap total;
  for_each_overlap_in(mesh, position, varying, {{0, n}}, cuts, target, [&](int64_t elements, int64_t times) {
    total.elements += elements * times;
    total.parts += times;
  });
  return total;
}

void for_each_overlap(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position, MeshDimSet varying,
                      const IntervalList& target, const std::function<void(int64_t elements, int64_t times)>& visit) {
  for_each_overlap_in(mesh, position, varying, {{0, n}}, cuts, target, visit);
}

std::map<int64_t, int64_t> part_lengths(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position,
                                        MeshDimSet varying) {
  std::map<int64_t, int64_t> parts;
  int64_t num_empty = 1;
  for (const Cut& c : cuts) num_empty *= varying.contains(c.mesh_dim) ? mesh.dim_size(c.mesh_dim) : 1;
  for_each_part(mesh, position, varying, n, cuts, 1, [&](int64_t length, int64_t times) {
    parts[length] += times;
    num_empty -= times;
  });
  if (num_empty > 0) parts[0] = num_empty;
  return parts;
}

}  // namespace shardwright
