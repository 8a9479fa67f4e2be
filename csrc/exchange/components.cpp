#include "exchange/components.h"

#include <algorithm>
#include <cstdint>

#include "exchange/index_set.h"

namespace shardwright {

// Finds each component by a breadth-first search from its first member.
Components components_of(size_t num_members, std::span<const OverlapCondition> conditions) {
  const size_t k = num_members;
  std::vector<IndexSet> receivers(k, IndexSet::all_of(k));  // by member
  std::vector<IndexSet> senders(k, IndexSet::all_of(k));    // by member
  for (size_t m = 0; m < k; ++m) {
    receivers[m].erase(m);
    senders[m].erase(m);
  }
  for (const auto& [held, needed, overlaps] : conditions) {
    const size_t num_parts =
        1 + std::max(*std::max_element(held.begin(), held.end()), *std::max_element(needed.begin(), needed.end()));
    std::vector<IndexSet> holding(num_parts, IndexSet::none_of(k));  // by part
    std::vector<IndexSet> needing(num_parts, IndexSet::none_of(k));
    for (size_t m = 0; m < k; ++m) {
      holding[held[m]].insert(m);
      needing[needed[m]].insert(m);
    }
    std::vector<IndexSet> receivers_of(num_parts, IndexSet::none_of(k));
    std::vector<IndexSet> senders_of(num_parts, IndexSet::none_of(k));
    for (const auto& [from, to] : overlaps) {
      receivers_of[from].unite(needing[to]);
      senders_of[to].unite(holding[from]);
    }
    for (size_t m = 0; m < k; ++m) {
      receivers[m].intersect(receivers_of[held[m]]);
      senders[m].intersect(senders_of[needed[m]]);
    }
  }
  Components all;
  all.of_member.assign(k, k);
  for (size_t first = 0; first < k; ++first) {
    if (all.of_member[first] < k) continue;
    const size_t index = all.members.size();
    std::vector<size_t> component{first};
    all.of_member[first] = index;
    int64_t exchanging = 0;
    for (size_t at = 0; at < component.size(); ++at) {
      const size_t member = component[at];
      exchanging += receivers[member].size();
      IndexSet peers = receivers[member];
      peers.unite(senders[member]);
      peers.for_each([&](size_t peer) {
        if (all.of_member[peer] < k) return;
        all.of_member[peer] = index;
        component.push_back(peer);
      });
    }
    std::sort(component.begin(), component.end());
    all.all_pairs_exchange.push_back(exchanging == std::ssize(component) * (std::ssize(component) - 1));
    all.members.push_back(std::move(component));
  }
  return all;
}

}  // namespace shardwright
