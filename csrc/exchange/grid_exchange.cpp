#include "exchange/grid_exchange.h"

#include <algorithm>
#include <utility>

#include "exchange/node_local.h"
#include "support/error.h"

namespace shardwright {
namespace {

using Overlap = ShardOverlaps::Overlap;

int64_t elements_of(std::span<const Overlap> all) { return all.empty() ? 0 : all.back().before + all.back().elements; }

}  // namespace

GridExchange::GridExchange(const Layout& src, const Layout& dst, ReplicaPolicy policy, int64_t ranks_per_node)
    : GridExchange(Grid(src), Grid(dst), src.dtype().size_bytes(), policy, 0, ranks_per_node) {
  check_invariant(src.shape() == dst.shape() && src.dtype() == dst.dtype(),
                  "the layouts of a crossing differ in shape or dtype: ", src, " and ", dst);
}

GridExchange::GridExchange(Grid src, Grid dst, int64_t item_bytes, ReplicaPolicy policy, int64_t first_sender,
                           int64_t ranks_per_node)
    : GridExchange(std::make_shared<const Geometry>(std::move(src), std::move(dst)), item_bytes, policy, first_sender,
                   ranks_per_node) {}

GridExchange::GridExchange(std::shared_ptr<const Geometry> all, int64_t item_bytes, ReplicaPolicy policy,
                           int64_t first_sender, int64_t ranks_per_node)
    : Exchange(item_bytes),
      all_(std::move(all)),
      policy_(policy),
      first_sender_(first_sender % all_->src.replicas()),
      ranks_per_node_(ranks_per_node) {
  check_invariant(policy != ReplicaPolicy::kAligned, "a crossing has ReplicaPolicy::kAligned");
  if (policy == ReplicaPolicy::kNodeLocal) assign_within_nodes_first();
}

GridExchange GridExchange::with_policy(ReplicaPolicy policy, int64_t ranks_per_node) const {
  return GridExchange(all_, item_bytes(), policy, first_sender_, ranks_per_node);
}

GridExchange::Geometry::Geometry(Grid from, Grid to)
    : src(std::move(from)), dst(std::move(to)), ranks(ranks_of(src.mesh(), dst.mesh())) {
  check_invariant(src.ndim() == dst.ndim(), "the grids of a crossing have ", src.ndim(), " and ", dst.ndim(), " dims");
  for (int t = 0; t < src.ndim(); ++t) overlaps.emplace_back(src.lists(t), dst.lists(t));

  for (const Rank rank : ranks) ends.push_back({src.part_replica_of(rank), dst.part_replica_of(rank)});
  find_absent();
  find_queues();
}

void GridExchange::Geometry::find_absent() {
  absent.resize(src.parts());
  for (const auto& [holds, needs] : ends) {
    if (!holds || !needs) continue;
    AbsentSection absent_section{0, 1, 0};
    int64_t sections = 1;
    for (int t = 0; t < src.ndim() && absent_section.elements > 0; ++t) {
      const int64_t held = src.shards_of(holds->part)[t];
      const int64_t needed = dst.shards_of(needs->part)[t];
      const Overlap* common = overlaps[t].between(held, needed);
      const auto choices = static_cast<int64_t>(overlaps[t].of_src(held).size());
      sections *= choices;
      absent_section.index *= choices;
      if (common != nullptr) absent_section.index += overlaps[t].of_dst(needed)[common->index].index;
      absent_section.elements *= common != nullptr ? common->elements : 0;
    }
    if (absent_section.elements == 0) continue;
    absent_section.index += needs->replica * sections;
    absent[holds->part].push_back(absent_section);
  }
  for (std::vector<AbsentSection>& all : absent) {
    std::sort(all.begin(), all.end(), [](const AbsentSection& a, const AbsentSection& b) { return a.index < b.index; });
    for (size_t i = 1; i < all.size(); ++i) all[i].before = all[i - 1].before + all[i - 1].elements;
  }
}

void GridExchange::Geometry::find_queues() {
  queues.resize(src.parts());
  for (int64_t part = 0; part < src.parts(); ++part) {
    Queue& queue = queues[part];
    queue.part = part;
    for (int t = 0; t < src.ndim(); ++t) {
      const std::span<const Overlap> entries = overlaps[t].of_src(src.shards_of(part)[t]);
      queue.sections *= static_cast<int64_t>(entries.size());
      queue.elements *= elements_of(entries);
    }
    queue.length = queue.elements * dst.replicas();
    if (!absent[part].empty()) queue.length -= absent[part].back().before + absent[part].back().elements;
    quota = std::max(quota, (queue.length + src.replicas() - 1) / src.replicas());
  }
  least_quota = quota;
  for (Queue& queue : queues) {
    const int64_t of_each = (queue.length + dst.replicas() - 1) / dst.replicas();
    const int64_t replicas_each = (dst.replicas() + src.replicas() - 1) / src.replicas();
    queue.quota = std::clamp<int64_t>(of_each * replicas_each, 1, quota);
    if (queue.length > 0 && !absent[queue.part].empty()) least_quota = std::min(least_quota, queue.quota);
  }
}

void GridExchange::assign_within_nodes_first() {
  check_invariant(ranks_per_node_ > 0, "a crossing with kNodeLocal has ", ranks_per_node_, " ranks per node");
  for (const Queue& queue : all_->queues) {
    std::vector<Rank> group;
    for (int64_t s = 0; s < src().replicas(); ++s) group.push_back(sender(queue, s));
    std::vector<Need> needs;
    for (int64_t section_index = 0; section_index < num_sections(queue); ++section_index) {
      const int64_t elements = section(queue, section_index).elements;
      if (elements > 0) needs.push_back({receiver(queue, section_index), elements});
    }
    for (const auto& [from, to, part] : assign_within_nodes(group, needs, ranks_per_node_, kMostInside * all_->quota)) {
      sends_[from].push_back({to, part});
      receives_[to].push_back({from, part});
    }
  }
  for (auto* all : {&sends_, &receives_}) {
    for (auto& [rank, ranges] : *all) std::ranges::sort(ranges, {}, &PeerRange::peer);
  }
}

const GridExchange::Ends& GridExchange::ends_of(Rank rank) const {
  static const Ends kNone;
  const auto found = std::lower_bound(all_->ranks.begin(), all_->ranks.end(), rank);
  return found != all_->ranks.end() && *found == rank ? all_->ends[found - all_->ranks.begin()] : kNone;
}

const std::vector<GridExchange::PeerRange>& GridExchange::listed(const Ranges& ranges, Rank rank) {
  static const std::vector<PeerRange> kNone;
  const auto found = ranges.find(rank);
  return found == ranges.end() ? kNone : found->second;
}

int64_t GridExchange::num_overlaps() const {
  int64_t overlaps = dst().replicas();
  for (int t = 0; t < src().ndim(); ++t) {
    int64_t of_dim = 0;
    const auto shards = static_cast<int64_t>(src().lists(t).size());
    for (int64_t s = 0; s < shards; ++s) of_dim += static_cast<int64_t>(all_->overlaps[t].of_src(s).size());
    overlaps = saturating_product(overlaps, of_dim);
  }
  return overlaps;
}

GridExchange::Inside GridExchange::inside(Rank rank) const {
  const auto bytes_of = [&](const Ranges& ranges) {
    int64_t elements = 0;
    for (const auto& [peer, range] : listed(ranges, rank)) {
      if (to_int(peer) / ranks_per_node_ == to_int(rank) / ranks_per_node_) elements += range.extent();
    }
    return elements * item_bytes();
  };
  return {bytes_of(receives_), bytes_of(sends_)};
}

Rank GridExchange::sender(const Queue& queue, int64_t sender_index) const {
  return src().rank_at(src().shards_of(queue.part), (sender_index + first_sender_) % src().replicas());
}

int64_t GridExchange::sender_index_of(const Grid::PartReplica& part_replica) const {
  return (part_replica.replica + src().replicas() - first_sender_) % src().replicas();
}

// Within a replica, sections are indexed by their overlap on each tensor dim, the last dim fastest. So the number of
// elements before a section is a sum over tensor dims. The term of a dim is the product of the section's own elements
// on the earlier dims, the elements of the earlier overlaps on this dim, and all elements on the later dims.
GridExchange::Section GridExchange::section(const Queue& queue, int64_t section_index) const {
  if (section_index == num_sections(queue)) return {queue.length, 0};
  const std::span<const int64_t> shards = src().shards_of(queue.part);
  Section section{0, 1};
  int64_t rest = section_index % queue.sections;
  int64_t all_after = 1;
  for (int t = src().ndim() - 1; t >= 0; --t) {
    const std::span<const Overlap> entries = all_->overlaps[t].of_src(shards[t]);
    const auto choices = static_cast<int64_t>(entries.size());
    const Overlap& own = entries[rest % choices];
    rest /= choices;
    section.begin = own.before * all_after + own.elements * section.begin;
    section.elements *= own.elements;
    all_after *= elements_of(entries);
  }
  section.begin += section_index / queue.sections * queue.elements;
  const std::vector<AbsentSection>& all = all_->absent[queue.part];
  const auto absent = std::ranges::lower_bound(all, section_index, {}, &AbsentSection::index);
  if (absent != all.begin()) section.begin -= (absent - 1)->before + (absent - 1)->elements;
  if (absent != all.end() && absent->index == section_index) section.elements = 0;
  return section;
}

int64_t GridExchange::first_served(const Queue& queue, int64_t sender_index) const {
  const int64_t begin = queue.quota * sender_index;
  int64_t low = 0;
  int64_t high = num_sections(queue);
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    const Section at = section(queue, middle);
    const bool is_before =
        policy_ == ReplicaPolicy::kEvenBytes ? at.begin + at.elements <= begin : 2 * at.begin + at.elements < 2 * begin;
    (is_before ? low : high) = is_before ? middle + 1 : middle;
  }
  return low;
}

// If messages are split, this sender and the next may share a section.
int64_t GridExchange::end_served(const Queue& queue, int64_t sender_index) const {
  const int64_t next = first_served(queue, sender_index + 1);
  const bool is_shared = policy_ == ReplicaPolicy::kEvenBytes && next < num_sections(queue) &&
                         section(queue, next).begin < queue.quota * (sender_index + 1);
  return next + (is_shared ? 1 : 0);
}

int64_t GridExchange::num_present(const Queue& queue, int64_t first, int64_t end) const {
  const std::vector<AbsentSection>& all = all_->absent[queue.part];
  const auto before = [&](int64_t section_index) {
    return std::ranges::lower_bound(all, section_index, {}, &AbsentSection::index);
  };
  return end - first - (before(end) - before(first));
}

Interval GridExchange::served(const Queue& queue, const Section& section, int64_t sender_index) const {
  if (policy_ == ReplicaPolicy::kWholeMessages) {
    return {0, (2 * section.begin + section.elements) / (2 * queue.quota) == sender_index ? section.elements : 0};
  }
  const int64_t begin = std::max(queue.quota * sender_index, section.begin);
  const int64_t end = std::min(queue.quota * (sender_index + 1), section.begin + section.elements);
  return begin < end ? Interval{begin - section.begin, end - section.begin} : Interval{0, 0};
}

Rank GridExchange::receiver(const Queue& queue, int64_t section_index) const {
  const std::span<const int64_t> from = src().shards_of(queue.part);
  std::vector<int64_t> shards(from.size());
  int64_t rest = section_index % queue.sections;
  for (size_t t = shards.size(); t-- > 0;) {
    const std::span<const Overlap> entries = all_->overlaps[t].of_src(from[t]);
    const auto choices = static_cast<int64_t>(entries.size());
    shards[t] = entries[rest % choices].shard;
    rest /= choices;
  }
  return dst().rank_at(shards, section_index / queue.sections);
}

std::vector<GridExchange::PeerRange> GridExchange::ranges(Rank rank, Direction direction) const {
  const bool sends = direction == Direction::kSend;
  if (policy_ == ReplicaPolicy::kNodeLocal) return listed(sends ? sends_ : receives_, rank);
  std::vector<PeerRange> ranges;
  const Ends& ends = ends_of(rank);
  if (!sends) {
    for_each_received(rank, ends, [&](Rank from, Interval range) { ranges.push_back({from, range}); });
  } else if (ends.holds) {
    const Queue& queue = all_->queues[ends.holds->part];
    const int64_t sender_index = sender_index_of(*ends.holds);
    const int64_t end = end_served(queue, sender_index);
    for (int64_t section_index = first_served(queue, sender_index); section_index < end; ++section_index) {
      const Interval range = served(queue, section(queue, section_index), sender_index);
      if (range.begin < range.end) ranges.push_back({receiver(queue, section_index), range});
    }
  }
  std::ranges::sort(ranges, {}, &PeerRange::peer);
  return ranges;
}

template <typename Visit>
void GridExchange::for_each_received(Rank rank, const Ends& ends, const Visit& visit) const {
  if (policy_ == ReplicaPolicy::kNodeLocal) {
    for (const PeerRange& peer_range : listed(receives_, rank)) visit(peer_range.peer, peer_range.range);
    return;
  }
  const auto& [holds, needs] = ends;
  if (!needs) return;
  const std::span<const int64_t> needed = dst().shards_of(needs->part);
  int64_t overlaps = 1;
  for (int t = 0; t < dst().ndim(); ++t) {
    overlaps *= static_cast<int64_t>(all_->overlaps[t].of_dst(needed[t]).size());
  }
  for (int64_t overlap = 0; overlap < overlaps; ++overlap) {
    int64_t rest = overlap;
    int64_t part = 0;
    int64_t parts_after = 1;
    int64_t section_index = 0;
    int64_t sections_after = 1;
    for (int t = src().ndim() - 1; t >= 0; --t) {
      const std::span<const Overlap> entries = all_->overlaps[t].of_dst(needed[t]);
      const auto choices = static_cast<int64_t>(entries.size());
      const Overlap& dim_overlap = entries[rest % choices];
      rest /= choices;
      part += dim_overlap.shard * parts_after;
      parts_after *= static_cast<int64_t>(src().lists(t).size());
      section_index += dim_overlap.index * sections_after;
      sections_after *= static_cast<int64_t>(all_->overlaps[t].of_src(dim_overlap.shard).size());
    }
    if (holds && holds->part == part) continue;
    const Queue& queue = all_->queues[part];
    const Section at = section(queue, needs->replica * queue.sections + section_index);
    const bool in_whole = policy_ == ReplicaPolicy::kWholeMessages;
    const int64_t first = in_whole ? (2 * at.begin + at.elements) / (2 * queue.quota) : at.begin / queue.quota;
    const int64_t last = in_whole ? first : (at.begin + at.elements - 1) / queue.quota;
    for (int64_t sender_index = first; sender_index <= last; ++sender_index)
      visit(sender(queue, sender_index), served(queue, at, sender_index));
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
  for (const Queue& queue : all_->queues) {
    if (queue.length == 0) continue;
    std::vector<Rank> senders;
    for (int64_t s = 0; s < src().replicas(); ++s) senders.push_back(sender(queue, s));
    std::sort(senders.begin(), senders.end());
    demand[std::move(senders)] += queue.length;
  }
  return demand;
}

int64_t GridExchange::num_elements(Rank rank, Direction direction) const {
  const Ends& ends = ends_of(rank);
  return direction == Direction::kSend ? sent(rank, ends).elements : received_elements(ends);
}

int64_t GridExchange::received_elements(const Ends& ends) const {
  const auto& [holds, needs] = ends;
  if (!needs) return 0;
  int64_t needed = 1;
  int64_t kept = holds ? 1 : 0;
  for (int t = 0; t < dst().ndim(); ++t) {
    const int64_t shard = dst().shards_of(needs->part)[t];
    needed *= elements_of(all_->overlaps[t].of_dst(shard));
    const Overlap* common = kept > 0 ? all_->overlaps[t].between(src().shards_of(holds->part)[t], shard) : nullptr;
    kept *= common != nullptr ? common->elements : 0;
  }
  return needed - kept;
}

bool GridExchange::communicates() const {
  return std::any_of(all_->queues.begin(), all_->queues.end(), [](const Queue& queue) { return queue.length > 0; });
}

GridExchange::Sent GridExchange::sent(Rank rank, const Ends& ends) const {
  if (policy_ == ReplicaPolicy::kNodeLocal) {
    const std::vector<PeerRange>& ranges = listed(sends_, rank);
    Sent sent{0, static_cast<int64_t>(ranges.size())};
    for (const PeerRange& peer_range : ranges) sent.elements += peer_range.range.extent();
    return sent;
  }
  if (!ends.holds) return {};
  const Queue& queue = all_->queues[ends.holds->part];
  const int64_t sender_index = sender_index_of(*ends.holds);
  const int64_t first = first_served(queue, sender_index);
  const int64_t end = end_served(queue, sender_index);
  const int64_t messages = num_present(queue, first, end);
  if (policy_ == ReplicaPolicy::kEvenBytes) {
    return {std::clamp<int64_t>(queue.length - queue.quota * sender_index, 0, queue.quota), messages};
  }
  return {section(queue, end).begin - section(queue, first).begin, messages};
}

int64_t GridExchange::messages_at_most(Rank rank, Direction direction) const {
  if (direction == Direction::kSend) return sent(rank, ends_of(rank)).messages;
  if (policy_ == ReplicaPolicy::kNodeLocal) return static_cast<int64_t>(listed(receives_, rank).size());
  const Ends& ends = ends_of(rank);
  const int64_t parts = parts_received(ends);
  if (policy_ == ReplicaPolicy::kWholeMessages) return parts;
  // A section of e elements is served in at most 2 + (e - 2) / s ranges of s elements. If s < least_quota, no rank is
  // absent, so s >= e. Then the section is served in at most two ranges, or in one if e = 1.
  const int64_t elements = received_elements(ends);
  const int64_t least = all_->least_quota;
  const int64_t most = parts + (elements + (least - 2) * parts) / least;
  return std::min({most, elements, parts * src().replicas()});
}

int64_t GridExchange::parts_received(const Ends& ends) const {
  const auto& [holds, needs] = ends;
  if (!needs) return 0;
  int64_t parts = 1;
  bool holds_one = holds.has_value();
  for (int t = 0; t < dst().ndim(); ++t) {
    const int64_t shard = dst().shards_of(needs->part)[t];
    parts *= static_cast<int64_t>(all_->overlaps[t].of_dst(shard).size());
    holds_one = holds_one && all_->overlaps[t].between(src().shards_of(holds->part)[t], shard) != nullptr;
  }
  return parts - (holds_one ? 1 : 0);
}

Traffic GridExchange::traffic(Rank rank, int64_t rounds) const { return traffic(rank, ends_of(rank), rounds); }

Traffic GridExchange::traffic(Rank rank, const Ends& ends, int64_t rounds) const {
  const Sent all_sent = sent(rank, ends);
  Traffic traffic{received_elements(ends) * item_bytes(), all_sent.elements * item_bytes(), 0, all_sent.messages};
  if (rounds == 1 && policy_ == ReplicaPolicy::kWholeMessages) {
    traffic.messages = parts_received(ends);
    return traffic;
  }
  if (rounds > 1) {
    traffic.sent_messages = 0;
    for (const auto& [peer, range] : ranges(rank, Direction::kSend)) {
      traffic.sent_messages += std::min(rounds, range.extent());
    }
  }
  for_each_received(rank, ends, [&](Rank, Interval range) { traffic.messages += std::min(rounds, range.extent()); });
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
  for (size_t i = 0; i < all_->ranks.size(); ++i) {
    const Rank rank = all_->ranks[i];
    const Traffic rank_traffic = traffic(rank, all_->ends[i], rounds);
    totals.maxima.received_bytes = std::max(totals.maxima.received_bytes, rank_traffic.received_bytes);
    totals.maxima.sent_bytes = std::max(totals.maxima.sent_bytes, rank_traffic.sent_bytes);
    totals.maxima.messages = std::max(totals.maxima.messages, rank_traffic.messages);
    totals.maxima.sent_messages = std::max(totals.maxima.sent_messages, rank_traffic.sent_messages);
    totals.received_bytes_sum += rank_traffic.received_bytes;
    if (policy_ != ReplicaPolicy::kNodeLocal) continue;
    const Inside within = inside(rank);
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
  for (const Ends& ends : all_->ends) {
    maxima.received_bytes = std::max(maxima.received_bytes, received_elements(ends) * item_bytes());
    maxima.messages = std::max(maxima.messages, parts_received(ends));
  }
  if (maxima.messages > 0) maxima.sent_bytes = all_->quota * item_bytes();
  maxima.touched_bytes = largest_result_bytes();
  return maxima;
}

bool GridExchange::crosses_nodes(int64_t ranks_per_node) const {
  if (ranks_per_node <= 0) return false;
  const auto node_of = [&](Rank rank) { return to_int(rank) / ranks_per_node; };
  if (node_of(all_->ranks.front()) == node_of(all_->ranks.back())) return false;
  for (size_t i = 0; i < all_->ranks.size(); ++i) {
    const Rank rank = all_->ranks[i];
    bool crosses = false;
    for_each_received(rank, all_->ends[i],
                      [&](Rank from, Interval) { crosses = crosses || node_of(from) != node_of(rank); });
    if (crosses) return true;
  }
  return false;
}

}  // namespace shardwright
