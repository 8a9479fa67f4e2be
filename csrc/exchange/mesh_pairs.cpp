// The extents of messages between pairs of ranks: number of elements, offsets and contiguity (Extent in
// mesh_exchange.h).
#include <algorithm>
#include <set>
#include <utility>

#include "exchange/mesh_exchange.h"
#include "layout/selection.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Returns a key that is equal for two piece lists only if they are the same except for a shift.
std::vector<int64_t> key_of(const PieceList& pieces) {
  std::vector<int64_t> key;
  for (const auto& [block, count, shift] : pieces.blocks()) {
    key.insert(key.end(), {static_cast<int64_t>(block.size()), count, shift.a, shift.b});
    for (const Piece& piece : block) {
      key.push_back(piece.length);
      key.push_back(piece.a_position - pieces.front().a_position);
      key.push_back(piece.b_position - pieces.front().b_position);
    }
  }
  return key;
}

// Returns true if two piece lists are equal except for a shift.
bool are_equal_up_to_shift(const PieceList& a, const PieceList& b) { return key_of(a) == key_of(b); }

}  // namespace

SharedRuns MeshExchange::shared_runs(const Part& held, const Part& needed) {
  const int64_t begin = std::max(held.begin, needed.begin);
  const int64_t end = std::min(held.end, needed.end);
  if (begin >= end) return {};
  if (held.has_gaps || needed.has_gaps) return shardwright::shared_runs(*held.list, *needed.list);
  return {end - begin, 1, begin - held.begin, begin - needed.begin};
}

MeshExchange::Part MeshExchange::part(KnownParts& parts, int tensor_dim, int64_t position) const {
  const auto& [list, length] = parts.at(tensor_dim, coordinates(position));
  const Interval span = span_of(list);
  return {span.begin, span.end, length, &list, list.size() > 1};
}

const MeshExchange::PartsOfRank& MeshExchange::parts_at(KnownParts& parts, CachedParts& last, int64_t position) const {
  if (last.position == position) return last.parts;
  last.position = position;
  last.parts.resize(ndim_);
  for (size_t t = 0; t < ndim_; ++t) last.parts[t] = part(parts, static_cast<int>(t), position);
  return last.parts;
}

Extent MeshExchange::kept_extent(int64_t position) const { return common_extent(held(position), needed(position)); }

// Visits dims from the innermost outwards. The common elements are contiguous in a part if they are one run on every
// dim with more than one common index, and the dim's stride in the part is the number of common elements of the inner
// dims.
template <typename RunsOf>
Extent MeshExchange::common_extent(const PartsOfRank& held, const PartsOfRank& needed, const RunsOf& runs_of) const {
  Extent extent{1, 0, 0, true, true};
  int64_t held_stride = 1;
  int64_t needed_stride = 1;
  for (size_t t = ndim_; t-- > 0;) {
    const SharedRuns runs = runs_of(t);
    if (runs.length == 0) return {};
    extent.first_held += runs.a_position * held_stride;
    extent.first_needed += runs.b_position * needed_stride;
    if (runs.length > 1) {
      extent.is_contiguous_held = extent.is_contiguous_held && runs.runs == 1 && held_stride == extent.count;
      extent.is_contiguous_needed = extent.is_contiguous_needed && runs.runs == 1 && needed_stride == extent.count;
    }
    extent.count *= runs.length;
    held_stride *= held[t].length;
    needed_stride *= needed[t].length;
  }
  return extent;
}

Extent MeshExchange::common_extent(const PartsOfRank& held, const PartsOfRank& needed) const {
  return common_extent(held, needed, [&](size_t t) { return shared_runs(held[t], needed[t]); });
}

Extent MeshExchange::Transfer::in_round(int64_t round) const {
  if (rounds_ == nullptr || whole_.count == 0) return whole_;
  Extent extent = (*rounds_)[round];
  extent.first_held += whole_.first_held;
  extent.first_needed += whole_.first_needed;
  return extent;
}

bool MeshExchange::Transfer::is_contiguous_in_some_round() const {
  if (rounds_ == nullptr) return whole_.is_contiguous_held || whole_.is_contiguous_needed;
  return std::any_of(rounds_->begin(), rounds_->end(),
                     [](const Extent& extent) { return extent.is_contiguous_held || extent.is_contiguous_needed; });
}

bool MeshExchange::sends_to(const Group& group, int64_t from, int64_t to) const {
  if (group.sending) return transfer(group, from, to).count() > 0;
  if (!may_send(from, to)) return false;
  const Mesh& mesh = before_.mesh();
  if (is_regular_) {
    return std::all_of(ties_.begin(), ties_.end(), [&](const Matching::Common& tie) {
      return tie.before.value_at(mesh, from, tie.radix) == tie.after.value_at(mesh, to, tie.radix);
    });
  }
  for (size_t t = 0; t < ndim_; ++t) {
    const int dim = static_cast<int>(t);
    const Part held = part(held_, dim, from);
    const Part needed = part(needed_, dim, to);
    if (shared_runs(held, needed).length == 0) return false;
  }
  return true;
}

MeshExchange::Transfer MeshExchange::transfer(const Group& group, int64_t from, int64_t to) const {
  if (group.sending) {
    const Interval range = group.sending->range(index_of(group, from), index_of(group, to));
    if (range.begin == range.end) return {};
    const PartsOfRank& has = held(from);
    const PartsOfRank& wants = needed(to);
    return divided_into_rounds(has, wants, common_extent(has, wants), range);
  }
  if (!is_regular_) return may_send(from, to) ? full_transfer(from, to) : Transfer();
  if (!sends_to(group, from, to)) return {};
  // All transfers have the same sizes. Offsets only matter if the elements are contiguous in some round.
  if (!any_transfer_ || any_transfer_->is_contiguous_in_some_round()) any_transfer_ = full_transfer(from, to);
  return *any_transfer_;
}

MeshExchange::Transfer MeshExchange::full_transfer(int64_t from, int64_t to) const {
  const PartsOfRank& has = held(from);
  const PartsOfRank& wants = needed(to);
  const Extent whole = common_extent(has, wants);
  return divided_into_rounds(has, wants, whole, {0, whole.count});
}

// Tries the peers that differ from the rank on one cutting mesh dim only, then all members of the group.
const MeshExchange::Transfer& MeshExchange::any_transfer(int64_t position) const {
  if (any_transfer_) return *any_transfer_;
  const Mesh& mesh = before_.mesh();
  const Group& own_group = group_without_members(position);
  const auto finds_transfer_with = [&](int64_t other) {
    if (other == position) return false;
    if (sends_to(own_group, position, other)) {
      any_transfer_ = full_transfer(position, other);
    } else if (sends_to(own_group, other, position)) {
      any_transfer_ = full_transfer(other, position);
    }
    return any_transfer_.has_value();
  };
  for (const int d : cutting_dims_.to_vector()) {
    const int64_t first = position - mesh.coordinate(position, d) * mesh.stride(d);
    for (int64_t c = 0; c < mesh.dim_size(d); ++c) {
      if (finds_transfer_with(first + c * mesh.stride(d))) return *any_transfer_;
    }
  }
  for (const int64_t other : mesh.group(position, group_dims_)) {
    if (finds_transfer_with(other)) break;
  }
  check_invariant(any_transfer_.has_value(), "position ", position, " exchanges no messages");
  return *any_transfer_;
}

// Caches the extents of the rounds. The key has the range, the lengths of the parts and the relative places of their
// common runs, which determine the extents relative to `whole`.
MeshExchange::Transfer MeshExchange::divided_into_rounds(const PartsOfRank& held, const PartsOfRank& needed,
                                                         const Extent& whole, Interval range) const {
  if (whole.count == 0 || (rounds_ == 1 && range.end - range.begin == whole.count)) return {whole, nullptr};
  std::vector<int64_t> key{range.begin, range.end};
  key.reserve(2 + 4 * ndim_);
  for (size_t t = 0; t < ndim_; ++t) {
    key.push_back(held[t].length);
    key.push_back(needed[t].length);
    if (!held[t].has_gaps && !needed[t].has_gaps) {
      key.push_back(shared_runs(held[t], needed[t]).length);
      continue;
    }
    const std::vector<int64_t> pieces = key_of(intersect(*held[t].list, *needed[t].list));
    key.push_back(-static_cast<int64_t>(pieces.size()));
    key.insert(key.end(), pieces.begin(), pieces.end());
  }
  const auto [found, is_new] = round_extents_.try_emplace(std::move(key));
  if (is_new) {
    Region held_region;
    Region needed_region;
    for (size_t t = 0; t < ndim_; ++t) held_region.push_back(*held[t].list);
    for (size_t t = 0; t < ndim_; ++t) needed_region.push_back(*needed[t].list);
    const Selection intersection(held_region, needed_region);
    for (int64_t round = 0; round < rounds_; ++round) {
      const Interval part = in_round(range, round, rounds_);
      const Selection elements = intersection.slice(part.begin, part.end);
      Extent extent{elements.count()};
      if (extent.count > 0) {
        const int64_t in_held = elements.contiguous_in_sender();
        const int64_t in_needed = elements.contiguous_in_receiver();
        extent.is_contiguous_held = in_held >= 0;
        extent.is_contiguous_needed = in_needed >= 0;
        extent.first_held = in_held - whole.first_held;
        extent.first_needed = in_needed - whole.first_needed;
      }
      found->second.push_back(extent);
    }
  }
  return {whole, &found->second};
}

// Overlaps are equal if the lengths of parts, the number of common indices and their runs are equal, and, with several
// rounds, the common runs are equal up to a shift.
void MeshExchange::add_overlap(const IntervalList& peer_part, int64_t times, OverlapSearch& search) const {
  const Layout& layout = search.others_hold ? before_ : after_;
  const IntervalList& list = overlap_lists_.emplace_back(layout.restricted(search.tensor_dim, peer_part));
  const Part other_part{list.front().begin, list.back().end, length(list), &list, list.size() > 1};
  const Part& held = search.others_hold ? other_part : search.own_part;
  const Part& needed = search.others_hold ? search.own_part : other_part;
  const SharedRuns shared = shared_runs(held, needed);
  PieceList pieces;
  if (rounds_ > 1 && (held.has_gaps || needed.has_gaps)) pieces = intersect(*held.list, *needed.list);
  for (OverlapClass& known : search.classes) {
    if (known.part.length == other_part.length && known.shared.length == shared.length &&
        known.shared.runs == shared.runs && are_equal_up_to_shift(known.pieces, pieces)) {
      known.times += times;
      overlap_lists_.pop_back();
      return;
    }
  }
  search.classes.push_back({other_part, times, shared, std::move(pieces)});
}

// Divides the list by the first cut and continues with each part. Parts that give equal overlaps are visited once: all
// full chunks of a run that the rank's part covers completely, and all full chunks between the first and the last that
// overlap the rank's part.
void MeshExchange::add_overlaps_of_parts(const IntervalList& list, std::span<const Cut> cuts, int64_t times,
                                         OverlapSearch& search) const {
  const Part& own_part = search.own_part;
  const SharedRuns overlapping = shardwright::shared_runs(list, *own_part.list);
  if (overlapping.length == 0) return;
  if (cuts.empty()) return add_overlap(list, times, search);
  const Mesh& mesh = before_.mesh();
  const Cut& first = cuts[0];
  const int64_t k = mesh.dim_size(first.mesh_dim);
  const auto divide_further = [&](const IntervalList& part, int64_t more) {
    add_overlaps_of_parts(part, cuts.subspan(1), times * more, search);
  };
  if (!cutting_dims_.contains(first.mesh_dim)) {
    return divide_further(first.rule.part(list, k, mesh.coordinate(search.position, first.mesh_dim)), 1);
  }
  const bool all_vary = std::all_of(
      cuts.begin(), cuts.end(), [&](const Cut& c) { return c.rule.is_chunks() && cutting_dims_.contains(c.mesh_dim); });
  const int64_t n = length(list);
  if (all_vary && list.size() == 1 && overlapping.runs == 1 && overlapping.length == n) {  // the rank's part covers it
    const int64_t begin = list.front().begin;
    const int64_t chunk = (n + k - 1) / k;
    const int64_t full = n / chunk;
    divide_further({{begin, begin + chunk}}, full);
    if (full * chunk < n) divide_further({{begin + full * chunk, begin + n}}, 1);
    return;
  }
  Interval coordinates{0, k};
  if (first.rule.makes_runs()) {  // only the coordinates with positions from the first to the last common element
    const int64_t end_position = intersection_length(list, {{0, own_part.list->back().end}});
    coordinates = first.rule.coordinates_of({overlapping.a_position, end_position}, n, k);
  }
  const bool all_runs = list.size() == 1 && own_part.list->size() == 1 &&
                        std::all_of(cuts.begin(), cuts.end(), [](const Cut& c) { return c.rule.is_chunks(); });
  if (all_runs && coordinates.end - coordinates.begin > 3) {  // all chunks between the first and the last are full
    divide_further(first.rule.part(list, k, coordinates.begin), 1);
    divide_further(first.rule.part(list, k, coordinates.begin + 1), coordinates.end - coordinates.begin - 2);
    return divide_further(first.rule.part(list, k, coordinates.end - 1), 1);
  }
  for (int64_t c = coordinates.begin; c < coordinates.end; ++c) divide_further(first.rule.part(list, k, c), 1);
}

ByCoordinates<std::vector<MeshExchange::OverlapClass>> MeshExchange::empty_overlap_cache(int tensor_dim,
                                                                                         bool others_hold) const {
  const Layout& peer_layout = others_hold ? before_ : after_;
  const Layout& own_layout = others_hold ? after_ : before_;
  return {before_.mesh(),
          (dims_of(peer_layout.cuts(tensor_dim)) - cutting_dims_) | dims_of(own_layout.cuts(tensor_dim))};
}

const std::vector<MeshExchange::OverlapClass>& MeshExchange::overlap_classes(int tensor_dim, int64_t position,
                                                                             bool others_hold) const {
  for (size_t i = overlap_classes_.size(); i < 2 * ndim_; ++i) {
    overlap_classes_.push_back(empty_overlap_cache(static_cast<int>(i / 2), i % 2 == 1));
  }
  return overlap_classes_[2 * tensor_dim + others_hold].at(coordinates(position), [&] {
    const Layout& peer_layout = others_hold ? before_ : after_;
    OverlapSearch search{
        tensor_dim, position, others_hold, part(others_hold ? needed_ : held_, tensor_dim, position), {}};
    if (search.own_part.length > 0) {
      add_overlaps_of_parts({{0, peer_layout.shape()[tensor_dim]}}, peer_layout.cuts(tensor_dim), 1, search);
    }
    return std::move(search.classes);
  });
}

std::optional<std::vector<int>> MeshExchange::profile(int64_t position) const {
  if (rounds_ > 1 || policy_ != ReplicaPolicy::kAligned) return std::nullopt;
  if (profiles_.empty()) {
    for (int t = 0; t < static_cast<int>(ndim_); ++t) {
      profiles_.emplace_back(before_.mesh(), dims_of(before_.cuts(t)) | dims_of(after_.cuts(t)));
    }
    known_profiles_.resize(ndim_);
  }
  std::vector<int> all(ndim_);
  for (size_t t = 0; t < ndim_; ++t) {
    if (!profiles_[t].fits_table()) return std::nullopt;
    all[t] = profiles_[t].at(coordinates(position), [&] { return profile_in(static_cast<int>(t), position); });
  }
  return all;
}

// The number stands for all values of the tensor dim, except offsets, that common_extent() reads.
int MeshExchange::profile_in(int tensor_dim, int64_t position) const {
  const Part held = part(held_, tensor_dim, position);
  const Part needed = part(needed_, tensor_dim, position);
  const SharedRuns own = shared_runs(held, needed);
  std::vector<int64_t> profile{held.length, needed.length, own.length, own.runs};
  for (const bool others_hold : {false, true}) {
    profile.push_back(-1);
    for (const OverlapClass& overlap : overlap_classes(tensor_dim, position, others_hold)) {
      profile.insert(profile.end(), {overlap.times, overlap.part.length, overlap.shared.length, overlap.shared.runs});
    }
  }
  std::map<std::vector<int64_t>, int>& known = known_profiles_[tensor_dim];
  return known.try_emplace(std::move(profile), static_cast<int>(known.size())).first->second;
}

// Every mesh dim cuts at most one tensor dim, so parts of different tensor dims combine freely: each combination of one
// overlap class per tensor dim is a message class. combination_ counts through the combinations, the last dim fastest.
const std::vector<MeshExchange::MessageClass>& MeshExchange::message_classes(int64_t position, bool others_hold) const {
  const int64_t peers_per_part = others_hold ? 1 : receivers_per_part_;
  const PartsOfRank& own_parts = others_hold ? needed(position) : held(position);
  std::vector<const std::vector<OverlapClass>*>& overlapping = overlapping_;
  std::vector<size_t>& at = combination_;
  PartsOfRank& others = others_;
  overlapping.resize(ndim_);
  at.assign(ndim_, 0);
  others.resize(ndim_);
  bool has_combination = true;
  for (size_t t = 0; t < ndim_; ++t) {
    overlapping[t] = &overlap_classes(static_cast<int>(t), position, others_hold);
    has_combination = has_combination && !overlapping[t]->empty();
  }
  std::vector<MessageClass>& all = classes_;
  all.clear();
  while (has_combination) {
    int64_t times = peers_per_part;
    for (size_t t = 0; t < ndim_; ++t) {
      others[t] = (*overlapping[t])[at[t]].part;
      times *= (*overlapping[t])[at[t]].times;
    }
    const PartsOfRank& has = others_hold ? others : own_parts;
    const PartsOfRank& wants = others_hold ? own_parts : others;
    const Extent whole = common_extent(has, wants, [&](size_t t) { return (*overlapping[t])[at[t]].shared; });
    all.push_back({divided_into_rounds(has, wants, whole, {0, whole.count}), times});
    size_t t = ndim_;
    while (t > 0 && ++at[t - 1] == overlapping[t - 1]->size()) at[--t] = 0;
    has_combination = t > 0;
  }
  all.push_back({full_transfer(position, position), -1});
  return all;
}

const std::vector<MeshExchange::MessageClass>& MeshExchange::member_messages(const Group& group, int64_t position,
                                                                             bool others_hold) const {
  std::vector<MessageClass>& all = classes_;
  all.clear();
  for (const int64_t member : group.positions) {
    if (member == position) continue;
    all.push_back({others_hold ? transfer(group, member, position) : transfer(group, position, member), 1});
  }
  return all;
}

const std::vector<MeshExchange::MessageClass>& MeshExchange::classes_sent(const Group& group, int64_t position) const {
  return group.sending ? member_messages(group, position, false) : message_classes(position, false);
}

const std::vector<MeshExchange::MessageClass>& MeshExchange::classes_received(const Group& group,
                                                                              int64_t position) const {
  return group.sending ? member_messages(group, position, true) : message_classes(position, true);
}

}  // namespace shardwright
