// Divides the members of a group into connected components: two members are in one component if they exchange data,
// directly or through other members. Members are numbered.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace shardwright {

struct Components {
  std::vector<std::vector<size_t>> members;  // by component: its members, ascending
  // By component: each member has elements for each other member. True for a component of one member.
  std::vector<bool> all_pairs_exchange;
  std::vector<size_t> of_member;  // by member: its component
};

// A condition for messages: member a sends to member b only if (held[a], needed[b]) is in `overlaps`.
struct OverlapCondition {
  std::vector<int> held;                      // by member: number of the part that it holds, from 0
  std::vector<int> needed;                    // by member: number of the part that it needs, from 0
  std::vector<std::pair<int, int>> overlaps;  // pairs of a held and a needed part, by number, with common elements
};

// Returns the components if a member sends to another whenever all conditions hold; without conditions, always. Every
// condition must have an entry for each member, and with conditions there must be a member.
//
// Example: 4 members, one condition: held 0 0 1 1, needed 0 0 1 1, overlaps (0, 0) and (1, 1). The components are
// {0, 1} and {2, 3}, and in both all pairs exchange data.
Components components_of(size_t num_members, std::span<const OverlapCondition> conditions);

}  // namespace shardwright
