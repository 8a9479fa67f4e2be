#include "exchange/mesh_exchange.h"

#include <algorithm>
#include <utility>

#include "exchange/axis_overlap.h"

namespace shardwright {
namespace {

// Returns the position with these coordinates: the inverse of coordinates_at().
int64_t position_at(const Mesh& mesh, const Coordinates& coordinates) {
  int64_t position = 0;
  for (int d = 0; d < mesh.ndim(); ++d) position += coordinates[d] * mesh.stride(d);
  return position;
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

SharedSending::SharedSending(const Layout& before, const Layout& after, MeshDimSet group_dims, ReplicaPolicy policy,
                             const std::vector<int64_t>& group)
    : policy_(policy) {
  const Mesh& mesh = before.mesh();
  const MeshDimSet replica = group_dims - before.cut_dims();
  replicas_ = mesh.group_size(replica);
  std::vector<Region> needed;
  for (const int64_t member : group) needed.push_back(after.region(member));
  queue_.resize(group.size());
  for (size_t m = 0; m < group.size(); ++m) {
    const std::vector<int64_t> senders = mesh.group(group[m], replica);
    sender_index_.push_back(std::find(senders.begin(), senders.end(), group[m]) - senders.begin());
    part_.push_back(std::find(group.begin(), group.end(), senders[0]) - group.begin());
  }
  for (size_t m = 0; m < group.size(); ++m) {
    if (part_[m] != m) continue;
    const Region held = before.region(group[m]);
    queue_[m].push_back({});  // the beginning of the first section
    for (size_t to = 0; to < group.size(); ++to) {
      const int64_t requested = part_[to] == m ? 0 : shared_elements(held, needed[to]);  // 0 if `to` holds the part
      const Offset& last = queue_[m].back();
      queue_[m].push_back({last.elements + requested, last.receivers + (requested > 0)});
    }
    const Offset& end = queue_[m].back();
    quota_.elements = std::max(quota_.elements, (end.elements + replicas_ - 1) / replicas_);
    quota_.receivers = std::max(quota_.receivers, (end.receivers + replicas_ - 1) / replicas_);
  }
}

Interval SharedSending::range(size_t from, size_t to) const {
  const std::vector<Offset>& queue = queue_[part_[from]];
  const int64_t begin_in_queue = queue[to].elements;
  const int64_t requested = queue[to + 1].elements - begin_in_queue;
  if (requested == 0) return {0, 0};
  if (policy_ == ReplicaPolicy::kWholeMessages) {
    return {0, queue[to].receivers / quota_.receivers == sender_index_[from] ? requested : 0};
  }
  const int64_t begin = quota_.elements * sender_index_[from];
  const int64_t first = std::max(begin, begin_in_queue);
  const int64_t last = std::min(begin + quota_.elements, begin_in_queue + requested);
  return first < last ? Interval{first - begin_in_queue, last - begin_in_queue} : Interval{0, 0};
}

MeshExchange::MeshExchange(const Layout& before, const Layout& after, MeshDimSet group_dims, ReplicaPolicy policy,
                           int64_t rounds)
    : Exchange(before.dtype().size_bytes()),
      before_(before),
      after_(after),
      group_dims_(group_dims),
      policy_(policy),
      rounds_(rounds),
      ndim_(before.ndim()),
      cutting_dims_(group_dims & before.cut_dims()),
      replica_dims_(group_dims - before.cut_dims()),
      receivers_per_part_(before.mesh().group_size(cutting_dims_ - after.cut_dims())),
      kept_elements_(before, after),
      held_(before),
      needed_(after) {
  is_regular_ = policy == ReplicaPolicy::kAligned && !kept_elements_.matchings().empty();
  needed_by_each_ = sent_elements_ = after.largest_part_elements();
  for (const Matching& matching : kept_elements_.matchings()) {
    message_elements_ *= matching.elements_per_overlap();
    sources_ *= matching.sources();
    for (const Matching::Common& digit : matching.digits()) {
      if (digit.is_tie()) ties_.push_back(digit);
      if (digit.before.mesh_dim < 0 || digit.after.mesh_dim < 0) continue;
      if (before.cut_dims().contains(digit.after.mesh_dim)) continue;
      sent_elements_ *= digit.radix;  // only one in `radix` ranks sends
      replica_ties_.push_back(digit);
    }
  }
}

// ---- Exchange

const std::vector<Rank>& MeshExchange::ranks() const {
  if (ranks_.empty()) {
    ranks_ = mesh().ranks();
    std::sort(ranks_.begin(), ranks_.end());
  }
  return ranks_;
}

bool MeshExchange::communicates() const {
  return std::any_of(ranks().begin(), ranks().end(),
                     [&](Rank rank) { return num_elements(rank, Direction::kReceive) > 0; });
}

int64_t MeshExchange::num_elements(Rank rank, Direction direction) const {
  const std::optional<Position> position = mesh().position_of(rank);
  if (!position) return 0;
  const Traffic traffic = traffic_at(*position);
  return (direction == Direction::kSend ? traffic.sent_bytes : traffic.received_bytes) / item_bytes();
}

Traffic MeshExchange::traffic(Rank rank, int64_t rounds) const {
  if (rounds != rounds_) return Exchange::traffic(rank, rounds);
  const std::optional<Position> position = mesh().position_of(rank);
  return position ? traffic_at(*position) : Traffic{};
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
                                       : Interval{0, elements_between(all.positions[from], all.positions[to])};
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
    const Selection common =
        direction == Direction::kSend ? Selection(*own, after_.region(peer)) : Selection(before_.region(peer), *own);
    messages.push_back({mesh().rank_at(peer), common.slice(range.begin, range.end)});
  });
  return messages;
}

std::optional<Region> MeshExchange::region(Rank rank, Direction side) const {
  const std::optional<Position> position = mesh().position_of(rank);
  if (!position) return std::nullopt;
  return (side == Direction::kSend ? before_ : after_).region(*position);
}

std::vector<LocalAxis> MeshExchange::local_axes(Rank, Direction) const {
  std::vector<LocalAxis> axes;
  for (int t = 0; t < static_cast<int>(ndim_); ++t) axes.push_back({{t}, {}, 0});
  return axes;
}

// ---- Counts

const Coordinates& MeshExchange::coordinates(int64_t position) const {
  if (position != position_) coordinates_at(before_.mesh(), position_ = position, coordinates_);
  return coordinates_;
}

Traffic MeshExchange::traffic_at(int64_t position) const {
  if (policy_ != ReplicaPolicy::kAligned) return traffic_by_pairs(position);
  if (!is_regular_) return traffic_by_dims(position);
  bool sends = true;
  for (const Matching::Common& tie : replica_ties_) sends = sends && tie.agrees_at(mesh(), position);
  return regular_traffic(kept_elements_.at(position), sends);
}

// A rank needs the same number of elements from each source. Each takes one message per round, but at most one per
// element.
Traffic MeshExchange::regular_traffic(int64_t own, bool sends) const {
  const int64_t messages_each = std::min(rounds_, message_elements_);
  const int64_t itself = own > 0 ? 1 : 0;  // a rank is one of its sources if it keeps elements
  Traffic traffic{(needed_by_each_ - own) * item_bytes(), 0, (sources_ - itself) * messages_each, 0};
  if (sends) {
    traffic.sent_bytes = (sent_elements_ - own) * item_bytes();
    traffic.sent_messages = (sent_elements_ / message_elements_ - itself) * messages_each;
  }
  return traffic;
}

std::optional<Traffic> MeshExchange::upper_bound() const {
  if (!is_regular_) return std::nullopt;
  const bool some_keep_nothing = !kept_elements_.varying_dims().empty();
  return regular_traffic(some_keep_nothing ? 0 : kept_elements_.at(0), true);
}

// Computes and caches the traffic of all members of the group at once, from every pair.
Traffic MeshExchange::traffic_by_pairs(int64_t position) const {
  if (!traffic_of_pairs_.contains(position)) {
    const Group& all = group(position);
    for (const int64_t member : all.positions) traffic_of_pairs_.try_emplace(member);
    for (size_t from = 0; from < all.positions.size(); ++from) {
      for (size_t to = 0; to < all.positions.size(); ++to) {
        const int64_t elements = all.sending->range(from, to).extent();
        if (from == to || elements == 0) continue;
        const int64_t bytes = elements * item_bytes();
        const int64_t messages = std::min(rounds_, elements);
        Traffic& of_sender = traffic_of_pairs_[all.positions[from]];
        of_sender = of_sender + Traffic{0, bytes, 0, messages};
        Traffic& of_receiver = traffic_of_pairs_[all.positions[to]];
        of_receiver = of_receiver + Traffic{bytes, 0, messages, 0};
      }
    }
  }
  return traffic_of_pairs_[position];
}

// Each combination of coordinates on the mesh dims that cut `before` is one rank that may hold some of the needed
// elements. Tensor dims are cut by different mesh dims, so their counts multiply. Sent elements are counted in the same
// way, over the receivers with this rank's coordinates on the replica dims.
Traffic MeshExchange::traffic_by_dims(int64_t position) const {
  const Coordinates& at = coordinates(position);
  if (rounds_ > 1) return traffic_by_dims_in_rounds(at);
  Factors all;
  for (int t = 0; t < before_.ndim(); ++t) {
    ByCoordinates<Factors>& known = counts_of_dim(t).factors;
    const auto compute = [&] { return factors_at(t, at); };
    const Factors factors = known.fits_table() ? known.at(at, compute) : compute();
    all.own *= factors.own;
    all.needed *= factors.needed;
    all.sent *= factors.sent;
    all.sources *= factors.sources;
    all.receivers *= factors.receivers;
  }
  const int64_t itself = std::min<int64_t>(all.own, 1);
  return {(all.needed - all.own) * item_bytes(), (all.sent * receivers_per_part_ - all.own) * item_bytes(),
          all.sources - itself, all.receivers * receivers_per_part_ - itself};
}

MeshExchange::Factors MeshExchange::factors_at(int tensor_dim, const Coordinates& at) const {
  const KnownParts::Part& before = held_.at(tensor_dim, at);
  const KnownParts::Part& after = needed_.at(tensor_dim, at);
  const PeerCounts& receivers = receiver_counts(tensor_dim, at, before.list);
  return {intersection_length(before.list, after.list), after.length, receivers.elements,
          source_counts(tensor_dim, at, after.list).count, receivers.count};
}

Traffic MeshExchange::traffic_by_dims_in_rounds(const Coordinates& at) const {
  Factors all;
  std::vector<const PeerCounts*> sources;
  std::vector<const PeerCounts*> receivers;
  for (int t = 0; t < before_.ndim(); ++t) {
    const Factors factors = factors_at(t, at);
    all.own *= factors.own;
    all.needed *= factors.needed;
    all.sent *= factors.sent;
    sources.push_back(&source_counts(t, at, needed_.at(t, at).list));
    receivers.push_back(&receiver_counts(t, at, held_.at(t, at).list));
  }
  const int64_t to_itself = std::min(all.own, rounds_);
  return {(all.needed - all.own) * item_bytes(), (all.sent * receivers_per_part_ - all.own) * item_bytes(),
          num_messages(sources) - to_itself, num_messages(receivers) * receivers_per_part_ - to_itself};
}

// Multiplies the counts of peers by length, tensor dim by tensor dim. A peer with e elements takes min(e, rounds)
// messages. Example: 4 rounds, two peers with 3 indices of dim 0, and one with 1 and one with 2 indices of dim 1. So
// two of the four combinations have 3 elements and two have 6: 2 * 3 + 2 * 4 = 14 messages.
int64_t MeshExchange::num_messages(const std::vector<const PeerCounts*>& by_dim) const {
  ByLength all{{1, 1}};
  for (const PeerCounts* peers : by_dim) {
    ByLength finer;
    for (const auto& [length, parts] : peers->by_length) {
      for (const auto& [elements, count] : all) finer[std::min(elements * length, rounds_)] += count * parts;
    }
    all = std::move(finer);
  }
  int64_t messages = 0;
  for (const auto& [elements, count] : all) messages += elements * count;
  return messages;
}

int64_t MeshExchange::elements_between(int64_t from, int64_t to) const {
  if (policy_ != ReplicaPolicy::kAligned) {
    const Group& all = group(from);
    return all.sending->range(index_of(all, from), index_of(all, to)).extent();
  }
  return may_send(from, to) ? common_extent(held(from), needed(to)).count : 0;
}

int64_t MeshExchange::reduce_scatter_messages(int64_t position) const {
  const Coordinates& at = coordinates(position);
  std::vector<PeerCounts> receivers;
  std::vector<const PeerCounts*> by_dim;
  receivers.reserve(before_.ndim());
  for (int t = 0; t < before_.ndim(); ++t) {
    const IntervalList& held = held_.at(t, at).list;
    by_dim.push_back(&receivers.emplace_back(count_peers(after_, t, at, group_dims_, held)));
  }
  return num_messages(by_dim) - std::min(num_needed(position), rounds_);  // without messages to itself
}

// The sources and the receivers depend on the coordinates that determine this rank's part, and on the coordinates that
// it shares with all peers.
const MeshExchange::PeerCounts& MeshExchange::source_counts(int tensor_dim, const Coordinates& at,
                                                            const IntervalList& needed) const {
  return counts_of_dim(tensor_dim).sources.at(at, [&] {
    return count_peers(before_, tensor_dim, at, cutting_dims_, needed);
  });
}

const MeshExchange::PeerCounts& MeshExchange::receiver_counts(int tensor_dim, const Coordinates& at,
                                                              const IntervalList& held) const {
  return counts_of_dim(tensor_dim).receivers.at(at, [&] {
    return count_peers(after_, tensor_dim, at, cutting_dims_, held);
  });
}

MeshExchange::PeerCounts MeshExchange::count_peers(const Layout& layout, int tensor_dim, const Coordinates& at,
                                                   MeshDimSet varying, const IntervalList& list) const {
  PeerCounts peers;
  for_each_overlap(mesh(), layout.shape()[tensor_dim], layout.cuts(tensor_dim), position_at(mesh(), at), varying, list,
                   [&](int64_t elements, int64_t times) {
                     peers.count += times;
                     peers.elements += elements * times;
                     if (rounds_ > 1) peers.by_length[std::min(elements, rounds_)] += times;
                   });
  if (rounds_ == 1 && peers.count > 0) peers.by_length[1] = peers.count;
  return peers;
}

MeshExchange::CountsOfDim& MeshExchange::counts_of_dim(int tensor_dim) const {
  for (int t = static_cast<int>(counts_.size()); t < static_cast<int>(ndim_); ++t) {
    const MeshDimSet before = dims_of(before_.cuts(t));
    const MeshDimSet after = dims_of(after_.cuts(t));
    counts_.push_back({{mesh(), after | (before - cutting_dims_)},
                       {mesh(), before | (after - cutting_dims_)},
                       {mesh(), before | after}});
  }
  return counts_[tensor_dim];
}

std::map<int64_t, int64_t> MeshExchange::part_lengths_in_group(const Layout& layout, int tensor_dim,
                                                               int64_t position) const {
  const std::vector<Cut>& cuts = layout.cuts(tensor_dim);
  if (!layout.is_restricted()) {
    return part_lengths(layout.mesh(), layout.shape()[tensor_dim], cuts, position, group_dims_);
  }
  std::map<int64_t, int64_t> lengths;
  for (const int64_t member : layout.mesh().group(position, dims_of(cuts) & group_dims_)) {
    ++lengths[length(layout.part(tensor_dim, member))];
  }
  return lengths;
}

// All combinations of parts of the tensor dims exist. So all members hold equally many elements if and only if their
// parts of every tensor dim are equally long, or if all hold none.
bool MeshExchange::hold_equally(int64_t position) const {
  const Layout& layout = before_;
  bool all_equal = true;
  for (int t = 0; t < layout.ndim(); ++t) {
    const std::map<int64_t, int64_t> held = part_lengths_in_group(layout, t, position);
    if (held.rbegin()->first == 0) return true;
    all_equal = all_equal && held.size() == 1;
  }
  return all_equal;
}

// Multiplies the counts of members by length, tensor dim by tensor dim.
std::map<int64_t, int64_t> MeshExchange::members_by_need(int64_t position) const {
  const Layout& layout = after_;
  const Mesh& mesh = layout.mesh();
  std::map<int64_t, int64_t> members{{1, mesh.group_size(group_dims_ - layout.cut_dims())}};
  for (int t = 0; t < layout.ndim(); ++t) {
    std::map<int64_t, int64_t> more;
    for (const auto& [length, times] : part_lengths_in_group(layout, t, position)) {
      for (const auto& [elements, count] : members) more[elements * length] += count * times;
    }
    members = std::move(more);
  }
  return members;
}

// ---- Groups

MeshExchange::Group& MeshExchange::group_without_members(int64_t position) const {
  const Mesh& mesh = before_.mesh();
  int64_t least = position;
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (group_dims_.contains(d)) least -= mesh.coordinate(position, d) * mesh.stride(d);
  }
  Group& group = groups_[least];
  group.least = least;
  group.size = mesh.group_size(group_dims_);
  return group;
}

MeshExchange::Group& MeshExchange::group(int64_t position) const {
  Group& group = group_without_members(position);
  if (!group.positions.empty()) return group;
  group.positions = before_.mesh().group(position, group_dims_);
  if (policy_ != ReplicaPolicy::kAligned) group.sending.emplace(before_, after_, group_dims_, policy_, group.positions);
  return group;
}

size_t MeshExchange::index_of(const Group& group, int64_t position) {
  return std::find(group.positions.begin(), group.positions.end(), position) - group.positions.begin();
}

}  // namespace shardwright
