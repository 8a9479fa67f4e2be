// Finds which ranks of a group are connected by what they exchange, and whether all are.
#include <algorithm>
#include <map>
#include <utility>

#include "program/pairs.h"

namespace shardwright {

// Which members of a group have something for which.
struct StepPairs::Talk {
  struct PartsOfDim {
    std::vector<int> held;  // by member
    std::vector<int> needed;
    int num_needed = 0;
    std::vector<bool> meet;  // by held and needed part
  };
  // By member. `from` can only have something for `to` if held[from] equals needed[to]: they are on one replica and,
  // where digits describe everything, their digits agree.
  std::vector<int> held;
  std::vector<int> needed;
  std::vector<PartsOfDim> parts;  // by tensor dim, where digits do not describe everything

  bool is_there(size_t from, size_t to) const {
    if (held[from] != needed[to]) return false;
    for (const PartsOfDim& dim : parts) {
      if (!dim.meet[dim.held[from] * dim.num_needed + dim.needed[to]]) return false;
    }
    return true;
  }
};

// Numbers what members hold and need, so that one member has something for another exactly if, in every list, the
// number of what the first holds matches that of what the second needs.
StepPairs::Talk StepPairs::talk_of(const Group& group) {
  const Mesh& mesh = step_.before.mesh();
  Talk talk;
  std::map<std::vector<int64_t>, int> numbers;
  const auto number_of = [&](std::vector<int64_t> values, int64_t position) {
    for (const int d : replicas_.to_vector()) values.push_back(mesh.coordinate(position, d));
    return numbers.emplace(std::move(values), static_cast<int>(numbers.size())).first->second;
  };
  for (const int64_t member : group.positions) {
    std::vector<int64_t> held_ties;
    std::vector<int64_t> needed_ties;
    for (const Matching::Common& tie : all_look_alike_ ? ties_ : std::vector<Matching::Common>()) {
      held_ties.push_back(mesh.coordinate(member, tie.before.mesh_dim) / tie.before.below % tie.radix);
      needed_ties.push_back(mesh.coordinate(member, tie.after.mesh_dim) / tie.after.below % tie.radix);
    }
    talk.held.push_back(number_of(std::move(held_ties), member));
    talk.needed.push_back(number_of(std::move(needed_ties), member));
  }
  for (size_t t = 0; t < (all_look_alike_ ? 0 : ndim_); ++t) {
    std::vector<Part> held;
    std::vector<Part> needed;
    std::map<const IntervalList*, int> held_numbers;
    std::map<const IntervalList*, int> needed_numbers;
    Talk::PartsOfDim& dim = talk.parts.emplace_back();
    const auto add = [](std::vector<Part>& parts, std::map<const IntervalList*, int>& known, const Part& part) {
      const auto [found, is_new] = known.emplace(part.list, static_cast<int>(parts.size()));
      if (is_new) parts.push_back(part);
      return found->second;
    };
    for (const int64_t member : group.positions) {
      dim.held.push_back(add(held, held_numbers, part(held_, static_cast<int>(t), member)));
      dim.needed.push_back(add(needed, needed_numbers, part(needed_, static_cast<int>(t), member)));
    }
    dim.num_needed = static_cast<int>(needed.size());
    for (const Part& has : held) {
      for (const Part& wants : needed) dim.meet.push_back(shared_runs(has, wants).length > 0);
    }
  }
  return talk;
}

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

// Counts the pairs that exchange something, including ranks with themselves; the counts of tensor dims multiply. All
// members can only talk to each other if these are all pairs, or all but the ranks with themselves.
bool StepPairs::work_out_all_talk(Group& group) {
  if (group.transfers || all_look_alike_) {
    connect(group);
    return group.circles.size() == 1 && group.all_pairs_talk[0];
  }
  if (!replicas_.empty() && step_.before.mesh().group_size(replicas_) > 1) return false;
  const Mesh& mesh = step_.before.mesh();
  int64_t talking = mesh.group_size(cutting_ - step_.after.cut_dims());
  for (int t = 0; t < static_cast<int>(ndim_); ++t) {
    const MeshDimSet cutting = dims_of(step_.after.cuts(t)) & step_.mesh_dims;
    int64_t meeting = 0;
    for (const int64_t member : mesh.group(group.least, cutting)) {
      for (const Meeting& one : meetings(t, member, true)) meeting += one.times;
    }
    talking *= meeting;
  }
  const int64_t k = group.size;
  if (talking < k * (k - 1)) return false;
  if (talking == k * k) return true;
  for (const int64_t member : group.positions) talking -= talks(group, member, member);
  return talking == k * (k - 1);
}

}  // namespace shardwright
