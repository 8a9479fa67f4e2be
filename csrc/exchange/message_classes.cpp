#include "exchange/message_classes.h"

#include <algorithm>
#include <span>
#include <utility>

#include "support/ceil_divide.h"

namespace shardwright {

// A search for the parts of peers that overlap a part of the rank at a position, on one tensor dim.
class MessageClasses::OverlapSearch {
 public:
  // `own_part` is the part that the rank needs if it receives, or holds if it sends.
  OverlapSearch(MessageClasses& all, int tensor_dim, int64_t position, Direction direction,
                const KnownParts::Part& own_part)
      : all_(all),
        tensor_dim_(tensor_dim),
        position_(position),
        direction_(direction),
        own_part_(own_part),
        peer_layout_(direction == Direction::kReceive ? all.move_.before : all.move_.after) {}

  // Returns the classes of overlaps with all parts of the rank's peers, itself included. Call it once.
  OverlapClasses classes() {
    if (own_part_.length > 0) {
      add_parts({{0, peer_layout_.shape()[tensor_dim_]}}, peer_layout_.cuts(tensor_dim_), 1);
    }
    return std::move(classes_);
  }

 private:
  // Adds the overlaps with the parts into which `cuts` divide a list, each counted `times` times. Divides the list by
  // the first cut and continues with each part. Parts that give equal overlaps are visited once: all full chunks of a
  // run that the rank's part covers completely, and all full chunks between the first and the last that overlap the
  // rank's part.
  //
  // Example: 12 indices, cut into chunks over a=6, and the rank's part [3, 11). The chunks [2, 4) to [10, 12) overlap
  // it. The first and the last have one common index each, and the three between them have two. Only the first, the
  // second and the last are visited, the second with a factor of 3.
  void add_parts(const IntervalList& list, std::span<const Cut> cuts, int64_t times) {
    const SharedRuns overlapping = shared_runs(list, own_part_.list);
    if (overlapping.length == 0) return;
    if (cuts.empty()) return add(list, times);
    const Mesh& mesh = peer_layout_.mesh();
    const Cut& first = cuts[0];
    const int64_t k = mesh.dim_size(first.mesh_dim);
    const auto divide_further = [&](const IntervalList& part, int64_t more) {
      add_parts(part, cuts.subspan(1), times * more);
    };
    if (!varies(first)) return divide_further(first.rule.part(list, k, mesh.coordinate(position_, first.mesh_dim)), 1);
    const bool all_chunks = std::all_of(cuts.begin(), cuts.end(), [](const Cut& c) { return c.rule.is_chunks(); });
    const bool all_vary = std::all_of(cuts.begin(), cuts.end(), [&](const Cut& c) { return varies(c); });
    const int64_t n = length(list);
    const bool is_covered = list.size() == 1 && overlapping.runs == 1 && overlapping.length == n;
    if (all_chunks && all_vary && is_covered) {
      const int64_t begin = list.front().begin;
      const int64_t chunk = ceil_divide(n, k);
      const int64_t full = n / chunk;
      divide_further({{begin, begin + chunk}}, full);
      if (full * chunk < n) divide_further({{begin + full * chunk, begin + n}}, 1);
      return;
    }
    Interval coordinates{0, k};
    if (first.rule.makes_runs()) {  // only the coordinates with positions from the first to the last common element
      const int64_t end_position = intersection_length(list, {{0, own_part_.list.back().end}});
      coordinates = first.rule.coordinates_of({overlapping.a_position, end_position}, n, k);
    }
    if (all_chunks && list.size() == 1 && !own_part_.has_gaps && coordinates.extent() > 3) {
      divide_further(first.rule.part(list, k, coordinates.begin), 1);
      divide_further(first.rule.part(list, k, coordinates.begin + 1), coordinates.extent() - 2);
      return divide_further(first.rule.part(list, k, coordinates.end - 1), 1);
    }
    for (int64_t c = coordinates.begin; c < coordinates.end; ++c) divide_further(first.rule.part(list, k, c), 1);
  }

  // Returns true if the peers differ in their coordinates on the mesh dim of a cut.
  bool varies(const Cut& cut) const { return all_.move_.cutting_dims.contains(cut.mesh_dim); }

  // Adds the overlap with one part of a peer, counted `times` times, to an equal class or as a new one. Overlaps are
  // equal if the lengths of parts, the number of common indices and their runs are equal, and, with several rounds, the
  // common runs are equal up to a shift.
  void add(const IntervalList& list, int64_t times) {
    KnownParts::Part peer_part(peer_layout_.kept_indices(tensor_dim_, list));
    const bool receives = direction_ == Direction::kReceive;
    const KnownParts::Part& held = receives ? peer_part : own_part_;
    const KnownParts::Part& needed = receives ? own_part_ : peer_part;
    const SharedRuns shared = shared_runs(held, needed);
    PieceList pieces;
    if (all_.move_.rounds > 1 && (held.has_gaps || needed.has_gaps)) pieces = intersect(held.list, needed.list);
    for (OverlapClass& known : classes_) {
      if (known.part->length == peer_part.length && known.shared.length == shared.length &&
          known.shared.runs == shared.runs && key_up_to_shift(known.pieces) == key_up_to_shift(pieces)) {
        known.times += times;
        return;
      }
    }
    classes_.push_back({&all_.peer_parts_.emplace_back(std::move(peer_part)), times, shared, std::move(pieces)});
  }

  MessageClasses& all_;
  const int tensor_dim_;
  const int64_t position_;
  const Direction direction_;
  const KnownParts::Part& own_part_;
  const Layout& peer_layout_;
  OverlapClasses classes_;
};

MessageClasses::MessageClasses(GroupMove& move, PartTransfers& transfers) : move_(move), transfers_(transfers) {
  for (int t = 0; t < move.before.ndim(); ++t) {
    const MeshDimSet before = dims_of(move.before.cuts(t));
    const MeshDimSet after = dims_of(move.after.cuts(t));
    dims_.push_back({{move.mesh(), before | (after - move.cutting_dims)},
                     {move.mesh(), after | (before - move.cutting_dims)},
                     {move.mesh(), before | after},
                     {}});
  }
}

// `at` counts through the combinations of one overlap class per tensor dim, the last dim fastest.
std::vector<MessageClass> MessageClasses::of_rank(int64_t position, Direction direction) {
  const bool receives = direction == Direction::kReceive;
  const int64_t peers_per_part = receives ? 1 : move_.receivers_per_part;
  const KnownParts::PartsOfRank& own_parts = (receives ? move_.needed : move_.held).of_rank(position);
  const size_t ndim = dims_.size();
  std::vector<const OverlapClasses*> overlapping(ndim);
  size_t num_combinations = 1;
  for (size_t t = 0; t < ndim; ++t) {
    overlapping[t] = &overlaps(static_cast<int>(t), position, direction);
    num_combinations *= overlapping[t]->size();
  }
  std::vector<size_t> at(ndim, 0);
  std::vector<SharedRuns> runs(ndim);
  KnownParts::PartsOfRank peer_parts(ndim);
  std::vector<MessageClass> classes;
  classes.reserve(num_combinations + 1);
  while (classes.size() < num_combinations) {
    int64_t times = peers_per_part;
    for (size_t t = 0; t < ndim; ++t) {
      const OverlapClass& overlap = (*overlapping[t])[at[t]];
      peer_parts[t] = overlap.part;
      runs[t] = overlap.shared;
      times *= overlap.times;
    }
    const KnownParts::PartsOfRank& held = receives ? peer_parts : own_parts;
    const KnownParts::PartsOfRank& needed = receives ? own_parts : peer_parts;
    classes.push_back({transfers_.of_parts(held, needed, runs), times});
    for (size_t t = ndim; t > 0 && ++at[t - 1] == overlapping[t - 1]->size(); --t) at[t - 1] = 0;
  }
  classes.push_back({transfers_.between(position, position), -1});
  return classes;
}

int64_t MessageClasses::num_sources(int tensor_dim, int64_t position) {
  int64_t count = 0;
  for (const OverlapClass& overlap : overlaps(tensor_dim, position, Direction::kReceive)) count += overlap.times;
  return count;
}

const MessageClasses::OverlapClasses& MessageClasses::overlaps(int tensor_dim, int64_t position, Direction direction) {
  const bool receives = direction == Direction::kReceive;
  Dim& dim = dims_[tensor_dim];
  return (receives ? dim.received : dim.sent).at(position, [&] {
    const KnownParts::Part& own_part = (receives ? move_.needed : move_.held).at(tensor_dim, position);
    return OverlapSearch(*this, tensor_dim, position, direction, own_part).classes();
  });
}

std::optional<std::vector<int>> MessageClasses::profile(int64_t position) {
  std::vector<int> all;
  for (int t = 0; t < move_.before.ndim(); ++t) {
    if (!dims_[t].profiles.fits_table()) return std::nullopt;
    all.push_back(dims_[t].profiles.at(position, [&] { return profile_in(t, position); }));
  }
  return all;
}

int MessageClasses::profile_in(int tensor_dim, int64_t position) {
  const KnownParts::Part& held = move_.held.at(tensor_dim, position);
  const KnownParts::Part& needed = move_.needed.at(tensor_dim, position);
  const SharedRuns own = shared_runs(held, needed);
  std::vector<int64_t> profile{held.length, needed.length, own.length, own.runs};
  for (const Direction direction : {Direction::kSend, Direction::kReceive}) {
    profile.push_back(-1);
    for (const OverlapClass& overlap : overlaps(tensor_dim, position, direction)) {
      profile.insert(profile.end(), {overlap.times, overlap.part->length, overlap.shared.length, overlap.shared.runs});
    }
  }
  std::map<std::vector<int64_t>, int>& numbers = dims_[tensor_dim].profile_numbers;
  return numbers.try_emplace(std::move(profile), static_cast<int>(numbers.size())).first->second;
}

}  // namespace shardwright
