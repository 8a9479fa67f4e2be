// Finds which ranks of a group are connected by what they exchange.
#include <algorithm>

#include "program/pairs.h"

namespace shardwright {

void StepPairs::connect(Group& group) {
  if (!group.circles.empty()) return;
  const size_t k = group.positions.size();
  const Talk talk = group.transfers ? Talk() : talk_of(group);
  std::vector<std::vector<size_t>> talks_with(k);
  std::vector<size_t> sends(k, 0);
  for (size_t from = 0; from < k; ++from) {
    for (size_t to = 0; to < k; ++to) {
      if (from == to) continue;
      if (group.transfers ? !talks(group, group.positions[from], group.positions[to]) : !talk.is_there(from, to))
        continue;
      talks_with[from].push_back(to);
      talks_with[to].push_back(from);
      ++sends[from];
    }
  }
  group.connected.assign(k, k);
  for (size_t first = 0; first < k; ++first) {
    if (group.connected[first] < k) continue;
    const size_t number = group.circles.size();
    std::vector<size_t> circle{first};
    group.connected[first] = number;
    size_t talking = 0;
    for (size_t at = 0; at < circle.size(); ++at) {
      talking += sends[circle[at]];
      for (const size_t peer : talks_with[circle[at]]) {
        if (group.connected[peer] < k) continue;
        group.connected[peer] = number;
        circle.push_back(peer);
      }
    }
    std::sort(circle.begin(), circle.end());
    group.all_pairs_talk.push_back(talking == circle.size() * (circle.size() - 1));
    group.circles.push_back(std::move(circle));
  }
}

}  // namespace shardwright
