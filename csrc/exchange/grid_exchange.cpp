#include "exchange/grid_exchange.h"

#include <algorithm>
#include <utility>

#include "exchange/node_local.h"
#include "support/error.h"

namespace shardwright {

GridExchange::GridExchange(const Layout& src, const Layout& dst, ReplicaPolicy policy, int64_t ranks_per_node)
    : GridExchange(Grid(src), Grid(dst), src.dtype().size_bytes(), policy, 0, ranks_per_node) {
  check_invariant(src.shape() == dst.shape() && src.dtype() == dst.dtype(),
                  "the layouts of a crossing differ in shape or dtype: ", src, " and ", dst);
}

GridExchange::GridExchange(Grid src, Grid dst, int64_t item_bytes, ReplicaPolicy policy, int64_t first_sender,
                           int64_t ranks_per_node)
    : GridExchange(std::make_shared<const Geometry>(std::move(src), std::move(dst)), item_bytes, policy, first_sender,
                   ranks_per_node) {}

GridExchange::GridExchange(std::shared_ptr<const Geometry> geometry, int64_t item_bytes, ReplicaPolicy policy,
                           int64_t first_sender, int64_t ranks_per_node)
    : Exchange(item_bytes),
      geometry_(std::move(geometry)),
      policy_(policy),
      first_sender_(first_sender % geometry_->src.replicas()),
      ranks_per_node_(ranks_per_node) {
  check_invariant(policy != ReplicaPolicy::kAligned, "a crossing has ReplicaPolicy::kAligned");
  if (policy == ReplicaPolicy::kNodeLocal) assign_within_nodes_first();
}

GridExchange GridExchange::with_policy(ReplicaPolicy policy, int64_t ranks_per_node) const {
  return GridExchange(geometry_, item_bytes(), policy, first_sender_, ranks_per_node);
}

void GridExchange::assign_within_nodes_first() {
  check_invariant(ranks_per_node_ > 0, "a crossing with kNodeLocal has ", ranks_per_node_, " ranks per node");
  for (const Queue& queue : geometry_->queues) {
    std::vector<Rank> senders;
    for (int64_t s = 0; s < src().replicas(); ++s) senders.push_back(sender(queue, s));
    std::vector<Need> needs;
    for (int64_t section_index = 0; section_index < num_sections(queue); ++section_index) {
      const int64_t elements = section(queue, section_index).elements;
      if (elements > 0) needs.push_back({receiver(queue, section_index), elements});
    }
    for (const auto& [from, to, part] :
         assign_within_nodes(senders, needs, ranks_per_node_, kMaxQuotasWithinNode * geometry_->quota)) {
      sends_[from].push_back({to, part});
      receives_[to].push_back({from, part});
    }
  }
  for (MessagesOfRank* messages : {&sends_, &receives_}) {
    for (auto& [rank, ranges] : *messages) std::ranges::sort(ranges, {}, &PeerRange::peer);
  }
}

const GridExchange::RankParts& GridExchange::parts_of(Rank rank) const {
  static const RankParts kNone;
  const auto found = std::lower_bound(geometry_->ranks.begin(), geometry_->ranks.end(), rank);
  if (found == geometry_->ranks.end() || *found != rank) return kNone;
  return geometry_->rank_parts[found - geometry_->ranks.begin()];
}

const std::vector<GridExchange::PeerRange>& GridExchange::messages_in(const MessagesOfRank& messages, Rank rank) {
  static const std::vector<PeerRange> kNone;
  const auto found = messages.find(rank);
  return found == messages.end() ? kNone : found->second;
}

int64_t GridExchange::num_overlaps() const {
  int64_t overlaps = dst().replicas();
  for (const ShardOverlaps& of_dim : geometry_->overlaps) overlaps = saturating_product(overlaps, of_dim.num_pairs());
  return overlaps;
}

GridExchange::NodeTraffic GridExchange::within_node(Rank rank) const {
  const auto bytes_of = [&](const MessagesOfRank& messages) {
    int64_t elements = 0;
    for (const auto& [peer, range] : messages_in(messages, rank)) {
      if (to_int(peer) / ranks_per_node_ == to_int(rank) / ranks_per_node_) elements += range.extent();
    }
    return elements * item_bytes();
  };
  return {bytes_of(receives_), bytes_of(sends_)};
}

std::vector<GridExchange::PeerRange> GridExchange::ranges(Rank rank, Direction direction) const {
  const bool sends = direction == Direction::kSend;
  if (policy_ == ReplicaPolicy::kNodeLocal) return messages_in(sends ? sends_ : receives_, rank);
  std::vector<PeerRange> ranges;
  const RankParts& own = parts_of(rank);
  if (!sends) {
    for_each_received(rank, own, [&](Rank from, Interval range) { ranges.push_back({from, range}); });
  } else if (own.holds) {
    const Queue& queue = geometry_->queues[own.holds->part];
    const int64_t sender_index = sender_index_of(*own.holds);
    const int64_t end = end_served(queue, sender_index);
    for (int64_t section_index = first_served(queue, sender_index); section_index < end; ++section_index) {
      const Interval range = served_range(queue, section(queue, section_index), sender_index);
      if (range.begin < range.end) ranges.push_back({receiver(queue, section_index), range});
    }
  }
  std::ranges::sort(ranges, {}, &PeerRange::peer);
  return ranges;
}

template <typename Visit>
void GridExchange::for_each_received(Rank rank, const RankParts& own, const Visit& visit) const {
  if (policy_ == ReplicaPolicy::kNodeLocal) {
    for (const PeerRange& peer_range : messages_in(receives_, rank)) visit(peer_range.peer, peer_range.range);
    return;
  }
  const auto& [holds, needs] = own;
  if (!needs) return;
  const std::span<const int64_t> needed = dst().shards_of(needs->part);
  int64_t overlaps = 1;
  for (int t = 0; t < dst().ndim(); ++t) {
    overlaps *= static_cast<int64_t>(geometry_->overlaps[t].of_dst(needed[t]).size());
  }
  // `overlap` numbers the overlapping parts of the source row-major. Their queues are numbered by part.
  for (int64_t overlap = 0; overlap < overlaps; ++overlap) {
    int64_t digits = overlap;
    int64_t part = 0;
    int64_t parts_after = 1;  // number of parts of the source on the later dims
    int64_t section_index = 0;
    int64_t sections_after = 1;  // number of sections on the later dims
    for (int t = src().ndim() - 1; t >= 0; --t) {
      const std::span<const Overlap> entries = geometry_->overlaps[t].of_dst(needed[t]);
      const auto radix = static_cast<int64_t>(entries.size());
      const Overlap& dim_overlap = entries[digits % radix];
      digits /= radix;
      part += dim_overlap.shard * parts_after;
      parts_after *= static_cast<int64_t>(src().lists(t).size());
      section_index += dim_overlap.index * sections_after;
      sections_after *= static_cast<int64_t>(geometry_->overlaps[t].of_src(dim_overlap.shard).size());
    }
    if (holds && holds->part == part) continue;
    const Queue& queue = geometry_->queues[part];
    const Section at = section(queue, needs->replica * queue.sections + section_index);
    const bool is_whole = policy_ == ReplicaPolicy::kWholeMessages;
    const int64_t first = is_whole ? (2 * at.begin + at.elements) / (2 * queue.quota) : at.begin / queue.quota;
    const int64_t last = is_whole ? first : (at.begin + at.elements - 1) / queue.quota;
    for (int64_t sender_index = first; sender_index <= last; ++sender_index) {
      visit(sender(queue, sender_index), served_range(queue, at, sender_index));
    }
  }
}

std::vector<Exchange::MessageSize> GridExchange::message_sizes(Rank rank, Direction direction) const {
  std::vector<MessageSize> sizes;
  for (const auto& [peer, range] : ranges(rank, direction)) sizes.push_back({peer, range.extent()});
  return sizes;
}

std::vector<Exchange::Message> GridExchange::messages(Rank rank, Direction direction) const {
  std::vector<Message> messages;
  const std::vector<PeerRange> all = ranges(rank, direction);
  if (all.empty()) return messages;
  const Region own = *region(rank, direction);
  for (const auto& [peer, range] : all) {
    const Selection common = direction == Direction::kSend ? Selection(own, *region(peer, Direction::kReceive))
                                                           : Selection(*region(peer, Direction::kSend), own);
    messages.push_back({peer, common.slice(range.begin, range.end)});
  }
  return messages;
}

std::optional<Region> GridExchange::region(Rank rank, Direction side) const {
  const std::optional<Grid::PartReplica> part_replica = grid(side).part_replica_of(rank);
  return part_replica ? std::optional<Region>(grid(side).region(part_replica->part)) : std::nullopt;
}

std::vector<LocalAxis> GridExchange::local_axes(Rank rank, Direction side) const {
  return grid(side).local_axes(grid(side).part_replica_of(rank)->part);
}

int64_t GridExchange::total_needed_elements() const {
  int64_t elements = dst().replicas();
  for (int t = 0; t < dst().ndim(); ++t) {
    int64_t of_dim = 0;
    for (const IntervalList& list : dst().lists(t)) of_dim += shardwright::length(list);
    elements *= of_dim;
  }
  return elements;
}

std::optional<std::map<std::vector<Rank>, int64_t>> GridExchange::demand() const {
  std::map<std::vector<Rank>, int64_t> demand;
  for (const Queue& queue : geometry_->queues) {
    if (queue.length == 0) continue;
    std::vector<Rank> senders;
    for (int64_t s = 0; s < src().replicas(); ++s) senders.push_back(sender(queue, s));
    std::sort(senders.begin(), senders.end());
    demand[std::move(senders)] += queue.length;
  }
  return demand;
}

int64_t GridExchange::num_elements(Rank rank, Direction direction) const {
  const RankParts& own = parts_of(rank);
  return direction == Direction::kSend ? sent(rank, own).elements : received_elements(own);
}

int64_t GridExchange::received_elements(const RankParts& own) const {
  const auto& [holds, needs] = own;
  if (!needs) return 0;
  int64_t needed = 1;
  int64_t kept = holds ? 1 : 0;
  for (int t = 0; t < dst().ndim(); ++t) {
    const int64_t shard = dst().shards_of(needs->part)[t];
    needed *= ShardOverlaps::elements_of(geometry_->overlaps[t].of_dst(shard));
    const Overlap* common = kept > 0 ? geometry_->overlaps[t].between(src().shards_of(holds->part)[t], shard) : nullptr;
    kept *= common != nullptr ? common->elements : 0;
  }
  return needed - kept;
}

bool GridExchange::communicates() const {
  return std::any_of(geometry_->queues.begin(), geometry_->queues.end(),
                     [](const Queue& queue) { return queue.length > 0; });
}

GridExchange::Sent GridExchange::sent(Rank rank, const RankParts& own) const {
  if (policy_ == ReplicaPolicy::kNodeLocal) {
    const std::vector<PeerRange>& ranges = messages_in(sends_, rank);
    Sent sent{0, static_cast<int64_t>(ranges.size())};
    for (const PeerRange& peer_range : ranges) sent.elements += peer_range.range.extent();
    return sent;
  }
  if (!own.holds) return {};
  const Queue& queue = geometry_->queues[own.holds->part];
  const int64_t sender_index = sender_index_of(*own.holds);
  const int64_t first = first_served(queue, sender_index);
  const int64_t end = end_served(queue, sender_index);
  const int64_t messages = num_present(queue, first, end);
  if (policy_ == ReplicaPolicy::kEvenBytes) {
    return {std::clamp<int64_t>(queue.length - queue.quota * sender_index, 0, queue.quota), messages};
  }
  return {section(queue, end).begin - section(queue, first).begin, messages};
}

int64_t GridExchange::messages_at_most(Rank rank, Direction direction) const {
  if (direction == Direction::kSend) return sent(rank, parts_of(rank)).messages;
  if (policy_ == ReplicaPolicy::kNodeLocal) return static_cast<int64_t>(messages_in(receives_, rank).size());
  const RankParts& own = parts_of(rank);
  const int64_t parts = parts_received(own);
  if (policy_ == ReplicaPolicy::kWholeMessages) return parts;
  // A section of e elements overlaps at most 2 + (e - 2) / s ranges of s elements. The sum over sections uses the
  // length least_quota for all ranges. Only queues without absent ranks have shorter ranges. These have the length of
  // whole replicas, so e <= s, and a section overlaps at most two of them, or one if e = 1: the sum is still an upper
  // bound.
  const int64_t elements = received_elements(own);
  const int64_t least = geometry_->least_quota;
  const int64_t most = parts + (elements + (least - 2) * parts) / least;
  return std::min({most, elements, parts * src().replicas()});
}

int64_t GridExchange::parts_received(const RankParts& own) const {
  const auto& [holds, needs] = own;
  if (!needs) return 0;
  int64_t parts = 1;
  bool holds_one = holds.has_value();
  for (int t = 0; t < dst().ndim(); ++t) {
    const int64_t shard = dst().shards_of(needs->part)[t];
    parts *= static_cast<int64_t>(geometry_->overlaps[t].of_dst(shard).size());
    holds_one = holds_one && geometry_->overlaps[t].between(src().shards_of(holds->part)[t], shard) != nullptr;
  }
  return parts - (holds_one ? 1 : 0);
}

Traffic GridExchange::traffic(Rank rank, int64_t rounds) const { return traffic(rank, parts_of(rank), rounds); }

Traffic GridExchange::traffic(Rank rank, const RankParts& own, int64_t rounds) const {
  const Sent all_sent = sent(rank, own);
  Traffic traffic{received_elements(own) * item_bytes(), all_sent.elements * item_bytes(), 0, all_sent.messages};
  if (rounds == 1 && policy_ == ReplicaPolicy::kWholeMessages) {
    traffic.messages = parts_received(own);
    return traffic;
  }
  if (rounds > 1) {
    traffic.sent_messages = 0;
    for (const auto& [peer, range] : ranges(rank, Direction::kSend)) {
      traffic.sent_messages += std::min(rounds, range.extent());
    }
  }
  for_each_received(rank, own, [&](Rank, Interval range) { traffic.messages += std::min(rounds, range.extent()); });
  return traffic;
}

int64_t GridExchange::largest_result_bytes() const {
  int64_t bytes = item_bytes();
  for (int t = 0; t < dst().ndim(); ++t) {
    int64_t longest = 0;
    for (const IntervalList& list : dst().lists(t)) longest = std::max(longest, shardwright::length(list));
    bytes *= longest;
  }
  return bytes;
}

GridExchange::Totals GridExchange::totals(int64_t rounds) const {
  Totals totals;
  for (size_t i = 0; i < geometry_->ranks.size(); ++i) {
    const Rank rank = geometry_->ranks[i];
    const Traffic rank_traffic = traffic(rank, geometry_->rank_parts[i], rounds);
    totals.maxima.received_bytes = std::max(totals.maxima.received_bytes, rank_traffic.received_bytes);
    totals.maxima.sent_bytes = std::max(totals.maxima.sent_bytes, rank_traffic.sent_bytes);
    totals.maxima.messages = std::max(totals.maxima.messages, rank_traffic.messages);
    totals.maxima.sent_messages = std::max(totals.maxima.sent_messages, rank_traffic.sent_messages);
    totals.received_bytes_sum += rank_traffic.received_bytes;
    if (policy_ != ReplicaPolicy::kNodeLocal) continue;
    const NodeTraffic within = within_node(rank);
    if (!totals.maxima.by_link) totals.maxima.by_link.emplace();
    StepCounts::ByLink& most = *totals.maxima.by_link;
    most.inside = std::max({most.inside, within.received_bytes, within.sent_bytes});
    most.between = std::max({most.between, rank_traffic.received_bytes - within.received_bytes,
                             rank_traffic.sent_bytes - within.sent_bytes});
  }
  totals.maxima.touched_bytes = largest_result_bytes();
  return totals;
}

StepCounts GridExchange::maxima_lower_bound() const {
  StepCounts maxima;
  for (const RankParts& own : geometry_->rank_parts) {
    maxima.received_bytes = std::max(maxima.received_bytes, received_elements(own) * item_bytes());
    maxima.messages = std::max(maxima.messages, parts_received(own));
  }
  if (maxima.messages > 0) maxima.sent_bytes = geometry_->quota * item_bytes();
  maxima.touched_bytes = largest_result_bytes();
  return maxima;
}

bool GridExchange::crosses_nodes(int64_t ranks_per_node) const {
  if (ranks_per_node <= 0) return false;
  const auto node_of = [&](Rank rank) { return to_int(rank) / ranks_per_node; };
  if (node_of(geometry_->ranks.front()) == node_of(geometry_->ranks.back())) return false;
  for (size_t i = 0; i < geometry_->ranks.size(); ++i) {
    const Rank rank = geometry_->ranks[i];
    bool crosses = false;
    for_each_received(rank, geometry_->rank_parts[i],
                      [&](Rank from, Interval) { crosses = crosses || node_of(from) != node_of(rank); });
    if (crosses) return true;
  }
  return false;
}

}  // namespace shardwright
