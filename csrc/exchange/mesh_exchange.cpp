#include "exchange/mesh_exchange.h"

#include <algorithm>
#include <utility>

#include "exchange/axis_overlap.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Counts the members of a position's group by the number of elements of their parts. Multiplies the counts of parts by
// length, tensor dim by tensor dim.
std::map<int64_t, int64_t> members_by_size(const Layout& layout, MeshDimSet group_dims, int64_t position) {
  const Mesh& mesh = layout.mesh();
  std::map<int64_t, int64_t> members{{1, mesh.group_size(group_dims - layout.cut_dims())}};
  for (int t = 0; t < layout.ndim(); ++t) {
    std::map<int64_t, int64_t> lengths;  // number of parts by length
    if (!layout.is_restricted()) {
      lengths = part_lengths(mesh, layout.shape()[t], layout.cuts(t), position, group_dims);
    } else {
      for (const int64_t member : mesh.group(position, dims_of(layout.cuts(t)) & group_dims)) {
        ++lengths[length(layout.part(t, member))];
      }
    }
    std::map<int64_t, int64_t> more;
    for (const auto& [length, times] : lengths) {
      for (const auto& [elements, count] : members) more[elements * length] += count * times;
    }
    members = std::move(more);
  }
  return members;
}

}  // namespace

bool reads_from(const Layout& before, MeshDimSet group_dims, int64_t sender, int64_t receiver) {
  const Mesh& mesh = before.mesh();
  const MeshDimSet replica = group_dims - before.cut_dims();
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (replica.contains(d) && mesh.coordinate(sender, d) != mesh.coordinate(receiver, d)) return false;
  }
  return true;
}

MeshExchange::MeshExchange(const Layout& before, const Layout& after, MeshDimSet group_dims, ReplicaPolicy policy,
                           int64_t rounds)
    : Exchange(before.dtype().size_bytes()),
      policy_(policy),
      regular_(shares_sending() ? std::nullopt : RegularCounts::of(before, after, rounds)),
      move_(before, after, group_dims, rounds) {}

// ---- Exchange

const std::vector<Rank>& MeshExchange::ranks() const {
  if (ranks_.empty()) ranks_ = ranks_of(mesh(), mesh());
  return ranks_;
}

bool MeshExchange::communicates() const {
  return std::any_of(ranks().begin(), ranks().end(),
                     [&](Rank rank) { return traffic_at(*mesh().position_of(rank)).messages > 0; });
}

template <typename Visit>
void MeshExchange::for_each_message(Rank rank, Direction direction, const Visit& visit) const {
  const std::optional<Position> here = mesh().position_of(rank);
  if (!here) return;
  const Group& all = group(*here);
  const size_t me = index_of(all, *here);
  for (size_t peer = 0; peer < all.positions.size(); ++peer) {
    if (peer == me) continue;
    const size_t from = direction == Direction::kSend ? me : peer;
    const size_t to = direction == Direction::kSend ? peer : me;
    const Interval range = all.sending ? all.sending->range(from, to)
                                       : Interval{0, transfer(all, all.positions[from], all.positions[to]).count()};
    if (range.begin < range.end) visit(Position{all.positions[peer]}, range);
  }
}

std::vector<Exchange::MessageSize> MeshExchange::message_sizes(Rank rank, Direction direction) const {
  std::vector<MessageSize> sizes;
  for_each_message(rank, direction,
                   [&](Position peer, Interval range) { sizes.push_back({mesh().rank_at(peer), range.extent()}); });
  return sizes;
}

std::vector<Exchange::Message> MeshExchange::messages(Rank rank, Direction direction) const {
  std::vector<Message> messages;
  const std::optional<Region> own = region(rank, direction);
  for_each_message(rank, direction, [&](Position peer, Interval range) {
    const Selection common = direction == Direction::kSend ? Selection(*own, move_.after.region(peer))
                                                           : Selection(move_.before.region(peer), *own);
    messages.push_back({mesh().rank_at(peer), common.slice(range.begin, range.end)});
  });
  return messages;
}

std::optional<Region> MeshExchange::region(Rank rank, Direction side) const {
  const std::optional<Position> position = mesh().position_of(rank);
  if (!position) return std::nullopt;
  return (side == Direction::kSend ? move_.before : move_.after).region(*position);
}

std::vector<LocalAxis> MeshExchange::local_axes(Rank, Direction) const {
  std::vector<LocalAxis> axes;
  for (int t = 0; t < move_.before.ndim(); ++t) axes.push_back({{t}, {}, 0});
  return axes;
}

// ---- Counts

Traffic MeshExchange::traffic_at(int64_t position) const {
  if (shares_sending()) return Exchange::traffic(mesh().rank_at(Position{position}), move_.rounds);
  return regular_ ? regular_->traffic(position) : counts_by_dim().traffic(position);
}

std::optional<Traffic> MeshExchange::upper_bound() const {
  return regular_ ? std::optional(regular_->upper_bound()) : std::nullopt;
}

std::map<int64_t, int64_t> MeshExchange::members_by_need(int64_t position) const {
  return members_by_size(move_.after, move_.group_dims, position);
}

// ---- Groups

MeshExchange::Group& MeshExchange::group_without_members(int64_t position) const {
  int64_t least = position;
  for (int d = 0; d < mesh().ndim(); ++d) {
    if (move_.group_dims.contains(d)) least -= mesh().coordinate(position, d) * mesh().stride(d);
  }
  Group& group = groups_[least];
  group.least = least;
  group.size = mesh().group_size(move_.group_dims);
  return group;
}

MeshExchange::Group& MeshExchange::group(int64_t position) const {
  Group& group = group_without_members(position);
  if (!group.positions.empty()) return group;
  group.positions = mesh().group(position, move_.group_dims);
  if (shares_sending()) group.sending.emplace(move_.before, move_.after, move_.group_dims, policy_, group.positions);
  return group;
}

size_t MeshExchange::index_of(const Group& group, int64_t position) {
  return std::find(group.positions.begin(), group.positions.end(), position) - group.positions.begin();
}

bool MeshExchange::is_even(Group& group) const {
  if (!group.is_even) {
    const std::map<int64_t, int64_t> members = members_by_size(move_.before, move_.group_dims, group.least);
    group.is_even = members.size() == 1 && !members.contains(0);
  }
  return *group.is_even;
}

bool MeshExchange::sends_to(const Group& group, int64_t from, int64_t to) const {
  if (group.sending) return transfer(group, from, to).count() > 0;
  if (!reads_from(move_.before, move_.group_dims, from, to)) return false;
  if (regular_) return regular_->ties_agree(from, to);
  for (int t = 0; t < move_.before.ndim(); ++t) {
    if (shared_runs(move_.held.at(t, from), move_.needed.at(t, to)).length == 0) return false;
  }
  return true;
}

const Components& MeshExchange::components(Group& group) const {
  if (!group.components) group.components = components_of(group.positions.size(), conditions(group));
  return *group.components;
}

// With shared sending, lists all pairs that exchange data. Otherwise two members can exchange data only if they have
// equal coordinates on the replica dims. In a regular exchange, the sender's tie values before must also be the
// receiver's tie values after (exchange/regular_counts.h). In other exchanges the parts of every tensor dim must
// overlap.
std::vector<OverlapCondition> MeshExchange::conditions(const Group& group) const {
  OverlapCondition numbers;
  if (group.sending) {
    const auto k = static_cast<int>(group.positions.size());
    for (int from = 0; from < k; ++from) {
      numbers.held.push_back(from);
      numbers.needed.push_back(from);
      for (int to = 0; to < k; ++to) {
        if (group.sending->range(from, to).extent() > 0) numbers.overlaps.emplace_back(from, to);
      }
    }
    return {numbers};
  }
  std::map<std::vector<int64_t>, int> known;  // numbers of the combinations of replica coordinates and values of ties
  const auto number_of = [&](std::vector<int64_t> values, int64_t position) {
    for (const int d : move_.replica_dims.to_vector()) values.push_back(mesh().coordinate(position, d));
    return known.emplace(std::move(values), static_cast<int>(known.size())).first->second;
  };
  for (const int64_t member : group.positions) {
    numbers.held.push_back(number_of(regular_ ? regular_->tie_values_before(member) : std::vector<int64_t>(), member));
    numbers.needed.push_back(number_of(regular_ ? regular_->tie_values_after(member) : std::vector<int64_t>(), member));
  }
  for (int v = 0; v < static_cast<int>(known.size()); ++v) numbers.overlaps.emplace_back(v, v);
  std::vector<OverlapCondition> all{std::move(numbers)};
  for (int t = 0; t < (regular_ ? 0 : move_.before.ndim()); ++t) {
    OverlapCondition& parts = all.emplace_back();
    std::map<const KnownParts::Part*, int> held;  // the address of a cached part identifies it
    std::map<const KnownParts::Part*, int> needed;
    for (const int64_t member : group.positions) {
      const auto number = [](auto& known, const KnownParts::Part& part) {
        return known.emplace(&part, static_cast<int>(known.size())).first->second;
      };
      parts.held.push_back(number(held, move_.held.at(t, member)));
      parts.needed.push_back(number(needed, move_.needed.at(t, member)));
    }
    for (const auto& [held_part, h] : held) {
      for (const auto& [needed_part, n] : needed) {
        if (shared_runs(*held_part, *needed_part).length > 0) parts.overlaps.emplace_back(h, n);
      }
    }
  }
  return all;
}

bool MeshExchange::all_exchange(Group& group) const {
  if (!group.all_exchange) group.all_exchange = find_all_exchange(group);
  return *group.all_exchange;
}

// Without shared sending and digits, counts the pairs of members that have common elements, including pairs of a member
// with itself. The counts of tensor dims multiply. All members exchange data if the count is that of all pairs, or of
// all pairs of different members.
bool MeshExchange::find_all_exchange(Group& group) const {
  if (group.sending || regular_) {
    const Components& all = components(group);
    return all.members.size() == 1 && all.all_pairs_exchange[0];
  }
  if (mesh().group_size(move_.replica_dims) > 1) return false;
  int64_t exchanging = move_.receivers_per_part;
  for (int t = 0; t < move_.before.ndim(); ++t) {
    const MeshDimSet cutting = dims_of(move_.after.cuts(t)) & move_.group_dims;
    int64_t num_overlaps = 0;
    for (const int64_t member : mesh().group(group.least, cutting)) num_overlaps += classes().num_sources(t, member);
    exchanging *= num_overlaps;
  }
  const int64_t k = group.size;
  if (exchanging < k * (k - 1)) return false;
  if (exchanging == k * k) return true;
  for (const int64_t member : group.positions) exchanging -= sends_to(group, member, member);
  return exchanging == k * (k - 1);
}

// ---- Messages between members

Transfer MeshExchange::transfer(const Group& group, int64_t from, int64_t to) const {
  if (group.sending) {
    const Interval range = group.sending->range(index_of(group, from), index_of(group, to));
    return range.extent() == 0 ? Transfer() : transfers_.between(from, to, range);
  }
  if (!regular_) {
    return reads_from(move_.before, move_.group_dims, from, to) ? transfers_.between(from, to) : Transfer();
  }
  if (!sends_to(group, from, to)) return {};
  // All transfers have the same sizes. Offsets only matter if the elements are contiguous in some round.
  if (!any_transfer_ || any_transfer_->is_contiguous_in_some_round()) any_transfer_ = transfers_.between(from, to);
  return *any_transfer_;
}

// Tries the peers that differ from the rank on one cutting mesh dim only, then all members of the group.
const Transfer& MeshExchange::any_transfer(int64_t position) const {
  if (any_transfer_) return *any_transfer_;
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
  for (const int d : move_.cutting_dims.to_vector()) {
    for (const int64_t other : mesh().group(position, MeshDimSet::single(d))) {
      if (finds_transfer_with(other)) return *any_transfer_;
    }
  }
  for (const int64_t other : mesh().group(position, move_.group_dims)) {
    if (finds_transfer_with(other)) break;
  }
  check_invariant(any_transfer_.has_value(), "position ", position, " exchanges no messages");
  return *any_transfer_;
}

std::vector<MessageClass> MeshExchange::message_classes(const Group& group, int64_t position,
                                                        Direction direction) const {
  if (!group.sending) return classes().of_rank(position, direction);
  std::vector<MessageClass> all;
  for (const int64_t member : group.positions) {
    if (member == position) continue;
    const bool sends = direction == Direction::kSend;
    all.push_back({sends ? transfer(group, position, member) : transfer(group, member, position), 1});
  }
  return all;
}

std::optional<std::vector<int>> MeshExchange::profile(int64_t position) const {
  return move_.rounds > 1 || shares_sending() ? std::nullopt : classes().profile(position);
}

}  // namespace shardwright
