// Finds the connected components of a group by exchanged messages, and whether all pairs of its ranks exchange data.
#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

#include "exchange/index_set.h"
#include "exchange/mesh_exchange.h"

namespace shardwright {

// The members to which each member of a group sends, and from which it receives. Begins with all pairs of members, from
// which remove_disjoint_pairs() removes pairs.
struct MeshExchange::Adjacency {
  explicit Adjacency(size_t num_members) : receivers(num_members, IndexSet::all_of(num_members)), senders(receivers) {
    for (size_t m = 0; m < num_members; ++m) {
      receivers[m].erase(m);
      senders[m].erase(m);
    }
  }

  // Numbers of the different parts of one tensor dim that the members hold and need. Member a can have elements for
  // member b only if the pair (held[a], needed[b]) is in `overlap`.
  struct PartNumbers {
    std::vector<int> held;    // by member
    std::vector<int> needed;  // by member
    std::vector<std::pair<int, int>> overlap;
    int num_held = 0;  // number of different parts
    int num_needed = 0;
  };
  // Removes the pairs of members (a, b) if (held[a], needed[b]) is not in `overlap`.
  void remove_disjoint_pairs(const PartNumbers& numbers) {
    const size_t k = receivers.size();
    std::vector<IndexSet> holding(numbers.num_held, IndexSet::none_of(k));
    std::vector<IndexSet> needing(numbers.num_needed, IndexSet::none_of(k));
    for (size_t m = 0; m < k; ++m) {
      holding[numbers.held[m]].insert(m);
      needing[numbers.needed[m]].insert(m);
    }
    std::vector<IndexSet> receivers_of(numbers.num_held, IndexSet::none_of(k));  // by held number
    std::vector<IndexSet> senders_of(numbers.num_needed, IndexSet::none_of(k));  // by needed number
    for (const auto& [held, needed] : numbers.overlap) {
      receivers_of[held].unite(needing[needed]);
      senders_of[needed].unite(holding[held]);
    }
    for (size_t m = 0; m < k; ++m) {
      receivers[m].intersect(receivers_of[numbers.held[m]]);
      senders[m].intersect(senders_of[numbers.needed[m]]);
    }
  }

  std::vector<IndexSet> receivers;  // by member
  std::vector<IndexSet> senders;    // by member
};

// Two members can exchange data only if they have equal coordinates on the replica dims and, if digits describe both
// layouts, they agree on the values of ties. Without digits, the parts of every tensor dim must overlap.
MeshExchange::Adjacency MeshExchange::adjacency_of(const Group& group) const {
  const Mesh& mesh = before_.mesh();
  Adjacency adjacency(group.positions.size());
  Adjacency::PartNumbers tie_values;  // numbers of combinations of replica coordinates and values of ties
  std::map<std::vector<int64_t>, int> numbers;
  const auto number_of = [&](std::vector<int64_t> values, int64_t position) {
    for (const int d : replica_dims_.to_vector()) values.push_back(mesh.coordinate(position, d));
    return numbers.emplace(std::move(values), static_cast<int>(numbers.size())).first->second;
  };
  for (const int64_t member : group.positions) {
    std::vector<int64_t> held_ties;
    std::vector<int64_t> needed_ties;
    for (const Matching::Common& tie : is_regular_ ? ties_ : std::vector<Matching::Common>()) {
      held_ties.push_back(tie.before.value_at(mesh, member, tie.radix));
      needed_ties.push_back(tie.after.value_at(mesh, member, tie.radix));
    }
    tie_values.held.push_back(number_of(std::move(held_ties), member));
    tie_values.needed.push_back(number_of(std::move(needed_ties), member));
  }
  tie_values.num_held = tie_values.num_needed = static_cast<int>(numbers.size());
  for (int v = 0; v < tie_values.num_held; ++v) tie_values.overlap.emplace_back(v, v);
  adjacency.remove_disjoint_pairs(tie_values);
  for (size_t t = 0; t < (is_regular_ ? 0 : ndim_); ++t) {
    Adjacency::PartNumbers parts;
    std::vector<Part> held;
    std::vector<Part> needed;
    std::map<const IntervalList*, int> held_numbers;
    std::map<const IntervalList*, int> needed_numbers;
    // Returns the number of a part, which is added if it is new. The address of its cached list identifies a part.
    const auto number_of_part = [](std::vector<Part>& parts, std::map<const IntervalList*, int>& known,
                                   const Part& part) {
      const auto [found, is_new] = known.emplace(part.list, static_cast<int>(parts.size()));
      if (is_new) parts.push_back(part);
      return found->second;
    };
    for (const int64_t member : group.positions) {
      parts.held.push_back(number_of_part(held, held_numbers, part(held_, static_cast<int>(t), member)));
      parts.needed.push_back(number_of_part(needed, needed_numbers, part(needed_, static_cast<int>(t), member)));
    }
    parts.num_held = static_cast<int>(held.size());
    parts.num_needed = static_cast<int>(needed.size());
    for (int h = 0; h < parts.num_held; ++h) {
      for (int n = 0; n < parts.num_needed; ++n) {
        if (shared_runs(held[h], needed[n]).length > 0) parts.overlap.emplace_back(h, n);
      }
    }
    adjacency.remove_disjoint_pairs(parts);
  }
  return adjacency;
}

MeshExchange::Adjacency MeshExchange::adjacency_by_pairs(const Group& group) const {
  const size_t k = group.positions.size();
  Adjacency adjacency(k);
  for (size_t from = 0; from < k; ++from) {
    for (size_t to = 0; to < k; ++to) {
      if (from == to || sends_to(group, group.positions[from], group.positions[to])) continue;
      adjacency.receivers[from].erase(to);
      adjacency.senders[to].erase(from);
    }
  }
  return adjacency;
}

// Finds each component by a breadth-first search from its first member.
void MeshExchange::connect(Group& group) const {
  if (!group.components.empty()) return;
  const size_t k = group.positions.size();
  const Adjacency adjacency = group.sending ? adjacency_by_pairs(group) : adjacency_of(group);
  group.component_of.assign(k, k);
  for (size_t first = 0; first < k; ++first) {
    if (group.component_of[first] < k) continue;
    const size_t index = group.components.size();
    std::vector<size_t> component{first};
    group.component_of[first] = index;
    int64_t exchanging = 0;
    for (size_t at = 0; at < component.size(); ++at) {
      const size_t member = component[at];
      exchanging += adjacency.receivers[member].size();
      IndexSet peers = adjacency.receivers[member];
      peers.unite(adjacency.senders[member]);
      peers.for_each([&](size_t peer) {
        if (group.component_of[peer] < k) return;
        group.component_of[peer] = index;
        component.push_back(peer);
      });
    }
    std::sort(component.begin(), component.end());
    group.all_pairs_exchange.push_back(exchanging == std::ssize(component) * (std::ssize(component) - 1));
    group.components.push_back(std::move(component));
  }
}

// Without shared sending and digits, counts the pairs of members that have common elements, including pairs of a member
// with itself. The counts of tensor dims multiply. All members exchange data if the count is that of all pairs, or of
// all pairs of different members.
bool MeshExchange::find_all_exchange(Group& group) const {
  if (group.sending || is_regular_) {
    connect(group);
    return group.components.size() == 1 && group.all_pairs_exchange[0];
  }
  if (!replica_dims_.empty() && before_.mesh().group_size(replica_dims_) > 1) return false;
  const Mesh& mesh = before_.mesh();
  int64_t exchanging = mesh.group_size(cutting_dims_ - after_.cut_dims());
  for (int t = 0; t < static_cast<int>(ndim_); ++t) {
    const MeshDimSet cutting = dims_of(after_.cuts(t)) & group_dims_;
    int64_t num_overlaps = 0;
    for (const int64_t member : mesh.group(group.least, cutting)) {
      for (const OverlapClass& overlap : overlap_classes(t, member, true)) num_overlaps += overlap.times;
    }
    exchanging *= num_overlaps;
  }
  const int64_t k = group.size;
  if (exchanging < k * (k - 1)) return false;
  if (exchanging == k * k) return true;
  for (const int64_t member : group.positions) exchanging -= sends_to(group, member, member);
  return exchanging == k * (k - 1);
}

}  // namespace shardwright
