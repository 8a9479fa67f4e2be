#include "exchange/shared_sending.h"

#include <algorithm>

#include "support/ceil_divide.h"

namespace shardwright {

SharedSending::SharedSending(const Layout& before, const Layout& after, MeshDimSet group_dims, ReplicaPolicy policy,
                             const std::vector<int64_t>& group)
    : policy_(policy) {
  const Mesh& mesh = before.mesh();
  const MeshDimSet replica = group_dims - before.cut_dims();
  const int64_t replicas = mesh.group_size(replica);
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
    quota_.elements = std::max(quota_.elements, ceil_divide(end.elements, replicas));
    quota_.receivers = std::max(quota_.receivers, ceil_divide(end.receivers, replicas));
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

}  // namespace shardwright
