// Finds which ranks of a group are connected by what they exchange, and chooses how a data move is carried out.
#include <algorithm>

#include "program/builder.h"
#include "program/pairs.h"

namespace shardwright {
namespace {

// In larger groups, examining every pair costs more than it saves, so messages are always used.
constexpr size_t kMaxGroupForPairs = 512;

// Gloo's single messages can stall where its all-to-all does not. Among up to this many ranks that are connected by
// what they exchange, an all-to-all is faster even if some pairs have nothing for each other.
constexpr size_t kMaxSparseAllToAll = 8;

}  // namespace

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

DataMovePlan way_of(StepPairs& pairs, StepPairs::Group& group, size_t member, Lowering lowering,
                    bool named_groups_only) {
  const Step& step = pairs.step();
  const auto k = static_cast<size_t>(group.size);
  if (step.op == StepOp::kAllGather) {
    const bool is_even = pairs.hold_equally(group.least) && pairs.num_held(group.least) > 0;
    if (lowering.gathers && step.rounds == 1 && is_even) return {DataMoveWay::kNativeGather, {}};
    const bool copies = lowering.copies_gather(static_cast<int64_t>(k), step.before.largest_part_bytes());
    return {copies ? DataMoveWay::kAllToAll : DataMoveWay::kMessages, {}};
  }
  if (k > kMaxGroupForPairs) return {DataMoveWay::kMessages, {}};
  const bool may_narrow = lowering.narrows_groups && !named_groups_only;
  if (may_narrow) {
    pairs.connect(group);
    const size_t number = group.connected[member];
    const std::vector<size_t>& circle = group.circles[number];
    if (circle.size() == 1) return {DataMoveWay::kLocal, {}};
    const bool suits_all_to_all = circle.size() <= kMaxSparseAllToAll || group.all_pairs_talk[number];
    return {suits_all_to_all ? DataMoveWay::kAllToAll : DataMoveWay::kMessages, circle};
  }
  if (k == 1) return {DataMoveWay::kLocal, {}};
  return {pairs.all_talk(group) ? DataMoveWay::kAllToAll : DataMoveWay::kMessages, {}};
}

}  // namespace shardwright
