// Finds which ranks of a group are connected by what they exchange, and whether all are.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <utility>

#include "program/pairs.h"

namespace shardwright {

namespace {

// Members of a group, by index.
class MemberSet {
 public:
  explicit MemberSet(size_t num_members, bool are_all = false) : words_((num_members + 63) / 64, are_all ? ~0ull : 0) {
    if (are_all && num_members % 64 > 0) words_.back() = (1ull << num_members % 64) - 1;
  }

  void insert(size_t member) { words_[member / 64] |= 1ull << member % 64; }
  void erase(size_t member) { words_[member / 64] &= ~(1ull << member % 64); }
  void add(const MemberSet& others) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] |= others.words_[i];
  }
  void keep(const MemberSet& others) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] &= others.words_[i];
  }
  size_t count() const {
    size_t total = 0;
    for (const uint64_t word : words_) total += std::popcount(word);
    return total;
  }
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (size_t i = 0; i < words_.size(); ++i) {
      for (uint64_t word = words_[i]; word != 0; word &= word - 1) visit(64 * i + std::countr_zero(word));
    }
  }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace

// Which other members of a group each member has something for, and which have something for it.
struct StepPairs::Talk {
  explicit Talk(size_t num_members) : receivers(num_members, MemberSet(num_members, true)), senders(receivers) {
    for (size_t m = 0; m < num_members; ++m) {
      receivers[m].erase(m);
      senders[m].erase(m);
    }
  }

  // Numbers of what each member holds and needs. One member has something for another only if a pair of their numbers,
  // held and needed, is among `meeting`.
  struct Numbers {
    std::vector<int> held;
    std::vector<int> needed;
    std::vector<std::pair<int, int>> meeting;
    int num_held = 0;
    int num_needed = 0;
  };
  void keep(const Numbers& numbers) {
    const size_t k = receivers.size();
    std::vector<MemberSet> holders(numbers.num_held, MemberSet(k));
    std::vector<MemberSet> needers(numbers.num_needed, MemberSet(k));
    for (size_t m = 0; m < k; ++m) {
      holders[numbers.held[m]].insert(m);
      needers[numbers.needed[m]].insert(m);
    }
    std::vector<MemberSet> receivers_of(numbers.num_held, MemberSet(k));  // by what is held
    std::vector<MemberSet> senders_of(numbers.num_needed, MemberSet(k));  // by what is needed
    for (const auto& [held, needed] : numbers.meeting) {
      receivers_of[held].add(needers[needed]);
      senders_of[needed].add(holders[held]);
    }
    for (size_t m = 0; m < k; ++m) {
      receivers[m].keep(receivers_of[numbers.held[m]]);
      senders[m].keep(senders_of[numbers.needed[m]]);
    }
  }

  std::vector<MemberSet> receivers;  // by member
  std::vector<MemberSet> senders;    // by member
};

// Members can only exchange data if they are on one replica and, where digits describe everything, their digits agree.
// Where they do not, the parts of every tensor dim have to meet as well.
StepPairs::Talk StepPairs::talk_of(const Group& group) {
  const Mesh& mesh = step_.before.mesh();
  Talk talk(group.positions.size());
  Talk::Numbers places;
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
    places.held.push_back(number_of(std::move(held_ties), member));
    places.needed.push_back(number_of(std::move(needed_ties), member));
  }
  places.num_held = places.num_needed = static_cast<int>(numbers.size());
  for (int number = 0; number < places.num_held; ++number) places.meeting.emplace_back(number, number);
  talk.keep(places);
  for (size_t t = 0; t < (all_look_alike_ ? 0 : ndim_); ++t) {
    Talk::Numbers parts;
    std::vector<Part> held;
    std::vector<Part> needed;
    std::map<const IntervalList*, int> held_numbers;
    std::map<const IntervalList*, int> needed_numbers;
    const auto add = [](std::vector<Part>& parts, std::map<const IntervalList*, int>& known, const Part& part) {
      const auto [found, is_new] = known.emplace(part.list, static_cast<int>(parts.size()));
      if (is_new) parts.push_back(part);
      return found->second;
    };
    for (const int64_t member : group.positions) {
      parts.held.push_back(add(held, held_numbers, part(held_, static_cast<int>(t), member)));
      parts.needed.push_back(add(needed, needed_numbers, part(needed_, static_cast<int>(t), member)));
    }
    parts.num_held = static_cast<int>(held.size());
    parts.num_needed = static_cast<int>(needed.size());
    for (int h = 0; h < parts.num_held; ++h) {
      for (int n = 0; n < parts.num_needed; ++n) {
        if (shared_runs(held[h], needed[n]).length > 0) parts.meeting.emplace_back(h, n);
      }
    }
    talk.keep(parts);
  }
  return talk;
}

// The same where replicas share the sending, from their transfers.
StepPairs::Talk StepPairs::talk_by_pairs(const Group& group) {
  const size_t k = group.positions.size();
  Talk talk(k);
  for (size_t from = 0; from < k; ++from) {
    for (size_t to = 0; to < k; ++to) {
      if (from == to || talks(group, group.positions[from], group.positions[to])) continue;
      talk.receivers[from].erase(to);
      talk.senders[to].erase(from);
    }
  }
  return talk;
}

void StepPairs::connect(Group& group) {
  if (!group.circles.empty()) return;
  const size_t k = group.positions.size();
  const Talk talk = group.transfers ? talk_by_pairs(group) : talk_of(group);
  group.connected.assign(k, k);
  for (size_t first = 0; first < k; ++first) {
    if (group.connected[first] < k) continue;
    const size_t number = group.circles.size();
    std::vector<size_t> circle{first};
    group.connected[first] = number;
    size_t talking = 0;
    for (size_t at = 0; at < circle.size(); ++at) {
      const size_t member = circle[at];
      talking += talk.receivers[member].count();
      MemberSet peers = talk.receivers[member];
      peers.add(talk.senders[member]);
      peers.for_each([&](size_t peer) {
        if (group.connected[peer] < k) return;
        group.connected[peer] = number;
        circle.push_back(peer);
      });
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
