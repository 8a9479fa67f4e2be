// The queues of an exchange (grid_exchange.h): the sections of a queue, and the sections that each sender serves.
//
// The index of a section is r * queue.sections + i for replica r of the destination. i numbers the receiver's part
// among the parts that overlap the queue's part, row-major: on each tensor dim, by the index of the receiver's shard in
// ShardOverlaps::of_src() of the part's shard. So i has one digit for each tensor dim.
//
// Example: two tensor dims. Two shards of the destination overlap the part's shard of dim 0, in 2 and 4 indices, and
// three overlap its shard of dim 1, in 1, 2 and 3 indices. Each replica has 6 sections, of 2, 4, 6, 4, 8 and 12
// elements. Section 4 has the digits 1 and 1. It begins after 2 * 6 + 4 * 1 = 16 elements: 2 earlier indices of dim 0
// with all 6 of dim 1, and its own 4 indices of dim 0 with 1 earlier index of dim 1.
#include <algorithm>
#include <utility>

#include "exchange/grid_exchange.h"
#include "support/error.h"

namespace shardwright {

GridExchange::Geometry::Geometry(Grid from, Grid to)
    : src(std::move(from)), dst(std::move(to)), ranks(ranks_of(src.mesh(), dst.mesh())) {
  check_invariant(src.ndim() == dst.ndim(), "the grids of a crossing have ", src.ndim(), " and ", dst.ndim(), " dims");
  for (int t = 0; t < src.ndim(); ++t) overlaps.emplace_back(src.lists(t), dst.lists(t));
  for (const Rank rank : ranks) rank_parts.push_back({src.part_replica_of(rank), dst.part_replica_of(rank)});
  find_absent();
  find_queues();
}

// A rank that holds a part and needs elements of it is absent from one section of the part's queue: the section of the
// overlap of both parts.
void GridExchange::Geometry::find_absent() {
  absent.resize(src.parts());
  for (const auto& [holds, needs] : rank_parts) {
    if (!holds || !needs) continue;
    AbsentSection absent_section{0, 1, 0};
    int64_t sections = 1;
    for (int t = 0; t < src.ndim() && absent_section.elements > 0; ++t) {
      const int64_t held = src.shards_of(holds->part)[t];
      const int64_t needed = dst.shards_of(needs->part)[t];
      const Overlap* common = overlaps[t].between(held, needed);
      const auto radix = static_cast<int64_t>(overlaps[t].of_src(held).size());
      sections *= radix;
      absent_section.index *= radix;
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

// First computes the longest range: the longest queue, divided evenly among its senders. The quota of a queue is the
// length of the whole replicas of the destination that each sender serves if replicas are divided among senders, but at
// most the longest range. Example: two senders serve three replicas of 4 elements, so each serves up to two replicas.
// The quota is 8 if another queue has a range of 8 or more. If the longest range is 6, the quota is 6.
void GridExchange::Geometry::find_queues() {
  queues.resize(src.parts());
  for (int64_t part = 0; part < src.parts(); ++part) {
    Queue& queue = queues[part];
    queue.part = part;
    for (int t = 0; t < src.ndim(); ++t) {
      const std::span<const Overlap> entries = overlaps[t].of_src(src.shards_of(part)[t]);
      queue.sections *= static_cast<int64_t>(entries.size());
      queue.elements *= ShardOverlaps::elements_of(entries);
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

Rank GridExchange::sender(const Queue& queue, int64_t sender_index) const {
  return src().rank_at(src().shards_of(queue.part), (sender_index + first_sender_) % src().replicas());
}

int64_t GridExchange::sender_index_of(const Grid::PartReplica& part_replica) const {
  return (part_replica.replica + src().replicas() - first_sender_) % src().replicas();
}

// The number of elements before a section in its replica is a sum over tensor dims. The term of a dim is the product of
// the section's own elements on the earlier dims, the elements of the earlier overlaps on this dim, and all elements on
// the later dims. Absent ranks before the section are subtracted at the end.
GridExchange::Section GridExchange::section(const Queue& queue, int64_t section_index) const {
  if (section_index == num_sections(queue)) return {queue.length, 0};
  const std::span<const int64_t> shards = src().shards_of(queue.part);
  Section section{0, 1};
  int64_t digits = section_index % queue.sections;
  int64_t all_after = 1;  // all elements on the later dims
  for (int t = src().ndim() - 1; t >= 0; --t) {
    const std::span<const Overlap> entries = geometry_->overlaps[t].of_src(shards[t]);
    const auto radix = static_cast<int64_t>(entries.size());
    const Overlap& own = entries[digits % radix];
    digits /= radix;
    section.begin = own.before * all_after + own.elements * section.begin;
    section.elements *= own.elements;
    all_after *= ShardOverlaps::elements_of(entries);
  }
  section.begin += section_index / queue.sections * queue.elements;
  const std::vector<AbsentSection>& all = geometry_->absent[queue.part];
  const auto absent = std::ranges::lower_bound(all, section_index, {}, &AbsentSection::index);
  if (absent != all.begin()) section.begin -= (absent - 1)->before + (absent - 1)->elements;
  if (absent != all.end() && absent->index == section_index) section.elements = 0;
  return section;
}

// Binary search for the first section that ends after the beginning of the sender's range; with whole messages, for the
// first section whose middle is not before it.
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
  const std::vector<AbsentSection>& all = geometry_->absent[queue.part];
  const auto absent_before = [&](int64_t section_index) {
    return std::ranges::lower_bound(all, section_index, {}, &AbsentSection::index);
  };
  return end - first - (absent_before(end) - absent_before(first));
}

Interval GridExchange::served_range(const Queue& queue, const Section& section, int64_t sender_index) const {
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
  int64_t digits = section_index % queue.sections;
  for (size_t t = shards.size(); t-- > 0;) {
    const std::span<const Overlap> entries = geometry_->overlaps[t].of_src(from[t]);
    const auto radix = static_cast<int64_t>(entries.size());
    shards[t] = entries[digits % radix].shard;
    digits /= radix;
  }
  return dst().rank_at(shards, section_index / queue.sections);
}

}  // namespace shardwright
