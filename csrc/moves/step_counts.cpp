#include "moves/step_counts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "moves/move_table.h"
#include "moves/rank_classes.h"
#include "moves/segments.h"
#include "moves/step_exchange.h"
#include "moves/traffic.h"

namespace shardwright {
namespace {

// Returns true if all cut rules descend (CutRule::descends). Then the rank at a group's first coordinates has the
// largest part of the group.
bool first_part_is_largest(const Layout& layout) {
  return std::all_of(layout.cuts().begin(), layout.cuts().end(), [](const std::vector<Cut>& cuts) {
    return std::all_of(cuts.begin(), cuts.end(), [](const Cut& c) { return c.rule.descends(); });
  });
}

// Returns true if parts are unequal and some cut is neither chunked nor strided. Then ranks between the first and the
// last coordinates of a group may send or receive the most.
bool is_uneven_by_rule(const Step& step) {
  if (step.before.has_equal_parts() && step.after.has_equal_parts()) return false;
  const auto has_rule = [](const Layout& layout) {
    return std::any_of(layout.cuts().begin(), layout.cuts().end(), [](const std::vector<Cut>& cuts) {
      return std::any_of(cuts.begin(), cuts.end(), [](const Cut& c) { return !c.rule.is_strided_or_chunks(); });
    });
  };
  return has_rule(step.before) || has_rule(step.after);
}

// Returns the maxima over ranks, from the traffic of one rank of each class. If position 0's group has the maxima, only
// examines ranks of this group.
StepCounts counts_over_classes(const Step& step, Lowering lowering) {
  StepCounts maxima;
  const MeshStepTraffic traffic(step, lowering);
  const int64_t item = step.before.dtype().size_bytes();
  const Mesh& mesh = step.before.mesh();
  const bool one_group_is_enough =
      !is_uneven_by_rule(step) && first_part_is_largest(step.before) && first_part_is_largest(step.after);
  RankClasses classes(mesh);
  traffic.split_classes(classes);
  for (const int64_t position : classes.sample().positions) {
    bool is_examined = true;
    for (int d = 0; d < mesh.ndim() && one_group_is_enough; ++d) {
      is_examined = is_examined && (step.mesh_dims.contains(d) || mesh.coordinate(position, d) == 0);
    }
    if (!is_examined) continue;
    raise_to(maxima, traffic.at(position));
    maxima.touched_bytes = std::max(maxima.touched_bytes, num_elements(step.after.region(position)) * item);
  }
  maxima.collectives =
      num_collectives(step.op, step.before.mesh().group_size(step.mesh_dims), reduces_natively(step, lowering));
  return maxima;
}

}  // namespace

Link link_of(const Exchange& exchange, const Topology& topology) {
  return exchange.crosses_nodes(topology.ranks_per_node) ? topology.between : topology.inside;
}

Link link_of(const Step& step, const Topology& topology) {
  if (is_cross_or_rearrange(step.op)) return link_of(*exchange_of(step), topology);
  return topology.slowest_link(step.before.mesh(), step.mesh_dims);
}

StepCounts step_counts(const Step& step, Lowering lowering) {
  if (is_cross_or_rearrange(step.op)) return exchange_of(step)->maxima(step.rounds);
  const bool examines_ranks =
      step.policy == ReplicaPolicy::kEvenBytes || step.rounds > 1 || (!is_local(step.op) && is_uneven_by_rule(step));
  if (examines_ranks) return counts_over_classes(step, lowering);
  MoveTable table(step.before, lowering, step.ordered);
  const MoveTable::State before = table.state(step.before.cuts(), step.before.partial_dims());
  const MoveTable::State after = table.state(step.after.cuts(), step.after.partial_dims());
  return table.step_counts(before, after, {step.op, step.mesh_dims, step.policy});
}

int64_t predicted_picoseconds(const Step& step, const StepCounts& counts, const Topology& topology) {
  if (is_cross_or_rearrange(step.op) && counts.messages == 0) return predicted_picoseconds(true, counts, {}, topology);
  const Link link = link_of(step, topology);
  const int64_t first = predicted_picoseconds(is_local(step.op), counts, link, topology);
  return saturating_sum(first, saturating_product((step.rounds - 1) * counts.collectives, topology.step_ps));
}

int64_t predicted_picoseconds(const Step& step, Lowering lowering, const Topology& topology) {
  return predicted_picoseconds(step, step_counts(step, lowering), topology);
}

namespace {

// The transfer times of each rank in one step of a plan, in picoseconds. A lane is one direction of one kind of link:
// within nodes, or between nodes and over the links of single mesh dims.
struct StepTimes {
  bool communicates = false;
  int64_t latency = 0;  // latency of the step's collectives and messages, for the worst rank
  enum Lane { kReceiveInside, kSendInside, kReceiveBetween, kSendBetween, kNumLanes };
  std::array<std::vector<int64_t>, kNumLanes> lanes;  // indexed by lane, then by index of the rank
};

// Returns the transfer times of a step; no lanes if no rank sends anything. `ranks` are the ranks of the plan,
// ascending.
StepTimes step_times(const Step& step, const Plan& plan, const std::vector<Rank>& ranks) {
  StepTimes times;
  const StepCounts maxima = step_counts(step, plan.lowering);
  if (is_local(step.op) || (is_cross_or_rearrange(step.op) && maxima.messages == 0)) return times;
  times.communicates = true;
  const Topology& topology = plan.topology;
  const Link link = link_of(step, topology);
  const int64_t messages = std::max(maxima.messages, maxima.sent_messages);
  times.latency = saturating_sum(maxima.collectives * topology.step_ps, saturating_product(messages, link.message_ps));
  const bool is_inside = link == topology.inside;
  std::optional<GridExchange> by_node;
  if (step.policy == ReplicaPolicy::kNodeLocal && !is_inside) by_node = crossing_of(step);
  const StepTraffic traffic(step, plan.lowering);
  for (const Rank rank : ranks) {
    const Traffic all = traffic.at(rank);
    GridExchange::NodeTraffic inside;
    if (is_inside) inside = {all.received_bytes, all.sent_bytes};
    if (by_node) inside = by_node->within_node(rank);
    times.lanes[StepTimes::kReceiveInside].push_back(
        picoseconds_for(inside.received_bytes, topology.inside.ps_per_kib));
    times.lanes[StepTimes::kSendInside].push_back(picoseconds_for(inside.sent_bytes, topology.inside.ps_per_kib));
    times.lanes[StepTimes::kReceiveBetween].push_back(
        picoseconds_for(all.received_bytes - inside.received_bytes, link.ps_per_kib));
    times.lanes[StepTimes::kSendBetween].push_back(
        picoseconds_for(all.sent_bytes - inside.sent_bytes, link.ps_per_kib));
  }
  return times;
}

// The fraction of a step's transfer time that one segment takes.
struct Share {
  int64_t numerator = 1;
  int64_t denominator = 1;
  bool operator<(const Share& other) const { return numerator * other.denominator < other.numerator * denominator; }
  // Returns this fraction of a time, rounded down. Divides first to avoid overflow.
  int64_t of(int64_t time) const {
    return time / denominator * numerator + time % denominator * numerator / denominator;
  }
};

// The steps of a plan as a pipeline of segments (moves/segments.h), and its predicted time.
class Pipeline {
 public:
  // Uses the steps of `plan` and ignores its segments.
  explicit Pipeline(const Plan& plan) : num_ranks_(ranks_of(plan).size()) {
    const std::vector<Rank> ranks = ranks_of(plan);
    for (const Step& step : plan.steps) {
      steps_.push_back(step_times(step, plan, ranks));
      copies_ += picoseconds_for(step_counts(step, plan.lowering).touched_bytes, plan.topology.memory_ps_per_kib);
    }
    copies_ +=
        picoseconds_for(plan.src.largest_part_bytes() + plan.dst.largest_part_bytes(), plan.topology.memory_ps_per_kib);
  }

  // Returns the time of `count` segments, each of which moves the fraction shares[s] of the bytes of step s. `copies`
  // is the time of all local copies, in picoseconds. In pipeline stage i, segment j is in step i - j.
  int64_t picoseconds(int64_t count, const std::vector<Share>& shares, int64_t copies) const {
    const auto last = static_cast<int64_t>(steps_.size()) - 1;
    int64_t total = copies;
    std::optional<std::pair<int64_t, int64_t>> timed_range;  // first and last step of the previous pipeline stage
    int64_t time = 0;                                        // of a stage in which the steps of timed_range run
    for (int64_t stage = 0; stage < count + last; ++stage) {
      const std::pair<int64_t, int64_t> range{std::max<int64_t>(stage - count + 1, 0), std::min(stage, last)};
      if (timed_range != range) time = stage_picoseconds(range.first, range.second, shares);
      timed_range = range;
      total = saturating_sum(total, time);
    }
    return total;
  }

  // Return the time if the plan is divided into `count` segments, which are equal or have the given shares.
  int64_t picoseconds_divided(int64_t count) const {
    return picoseconds(count, std::vector<Share>(steps_.size(), {1, count}), copies_);
  }
  int64_t picoseconds_divided(int64_t count, const std::vector<Share>& shares) const {
    return picoseconds(count, shares, copies_);
  }
  // Returns the time of `count` uniform segments, if this is the plan of one of them.
  int64_t picoseconds_repeated(int64_t count) const {
    return picoseconds(count, std::vector<Share>(steps_.size()), saturating_product(copies_, count));
  }

 private:
  // Returns the time of a pipeline stage in which the steps [first, last] run: the sum of their latencies, plus the
  // largest transfer time of a rank in a lane.
  int64_t stage_picoseconds(int64_t first, int64_t last, const std::vector<Share>& shares) const {
    int64_t latency = 0;
    for (int64_t s = first; s <= last; ++s) latency = saturating_sum(latency, steps_[s].latency);
    int64_t most = 0;
    for (int lane = 0; lane < StepTimes::kNumLanes; ++lane) {
      for (size_t rank = 0; rank < num_ranks_; ++rank) {
        int64_t time = 0;
        for (int64_t s = first; s <= last; ++s) {
          if (steps_[s].communicates) time += shares[s].of(steps_[s].lanes[lane][rank]);
        }
        most = std::max(most, time);
      }
    }
    return saturating_sum(latency, most);
  }

  size_t num_ranks_;
  std::vector<StepTimes> steps_;  // by step
  int64_t copies_ = 0;            // time of the local copies of all steps, in picoseconds
};

// The shares of non-uniform segments. A step's share is the largest number of indices that a part has in one segment,
// as a fraction of the longest part, before or after the step.
class NonUniformSegments {
 public:
  NonUniformSegments(const Plan& plan, int tensor_dim) {
    for (const Step& step : plan.steps) {
      parts_.emplace_back(PartsInSegments(step.before, tensor_dim), PartsInSegments(step.after, tensor_dim));
    }
  }

  // Returns one share per step.
  std::vector<Share> shares(int64_t count) const {
    std::vector<Share> all;
    for (const auto& [before, after] : parts_) all.push_back(std::max(share(before, count), share(after, count)));
    return all;
  }

 private:
  // Returns the largest number of indices that a part has in one segment, as a fraction of the longest part.
  static Share share(const PartsInSegments& parts, int64_t count) {
    return parts.longest() == 0 ? Share{1, count} : Share{parts.largest_count_in_segment(count), parts.longest()};
  }

  std::vector<std::pair<PartsInSegments, PartsInSegments>> parts_;
};

}  // namespace

int64_t predicted_picoseconds(const Plan& plan) {
  if (plan.segments.count > 1) {
    const int64_t count = plan.segments.count;
    if (are_uniform(plan)) return Pipeline(plans_of_segments(plan).front()).picoseconds_repeated(count);
    return Pipeline(plan).picoseconds_divided(count, NonUniformSegments(plan, plan.segments.tensor_dim).shares(count));
  }
  int64_t total = 0;
  for (const Step& step : plan.steps) {
    total = saturating_sum(total, predicted_picoseconds(step, plan.lowering, plan.topology));
  }
  return total;
}

namespace {

// Non-uniform segments have a program each, so few counts are tried, and they must save more than 1/50 of the time.
constexpr int64_t kNonUniformCounts[] = {2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32};
constexpr int64_t kNonUniformGainDivisor = 50;

// Returns the largest number of uniform segments that is a power of two, and the tensor dim that allows it.
Segments most_uniform(const Plan& plan) {
  Segments most;
  for (int t = 0; t < plan.src.ndim(); ++t) {
    const int64_t block = block_length(plan, t);
    Segments segments{t, 1};
    while (block > 0 && segments.count < kMaxSegments && block % (2 * segments.count) == 0) segments.count *= 2;
    if (segments.count > most.count) most = segments;
  }
  return most;
}

// Returns true if segments may be faster: at least two steps can overlap, and there are few enough ranks.
bool may_have_segments(const Plan& plan) {
  return plan.steps.size() >= 2 && static_cast<int64_t>(ranks_of(plan).size()) <= kMaxRanksInSegments;
}

// Replaces `best` by the fastest non-uniform segments if they save more than 1 / kNonUniformGainDivisor of its time.
void try_non_uniform(const Plan& plan, const Pipeline& pipeline, TimedSegments& best) {
  const auto is_faster = [&](int64_t time) {
    return time < best.picoseconds - best.picoseconds / kNonUniformGainDivisor;
  };
  std::vector<int64_t> counts;  // counts that are fast enough even with equal shares, which are the best case
  for (const int64_t count : kNonUniformCounts) {
    if (is_faster(pipeline.picoseconds_divided(count))) counts.push_back(count);
  }
  for (int t = 0; t < plan.src.ndim() && !counts.empty(); ++t) {
    if (!can_run_in_segments(plan, {t, counts.front()})) continue;
    const NonUniformSegments segments(plan, t);
    for (const int64_t count : counts) {
      if (count > plan.src.shape()[t]) break;
      const int64_t time = pipeline.picoseconds_divided(count, segments.shares(count));
      if (is_faster(time)) best = {{t, count}, time};
    }
  }
}

}  // namespace

TimedSegments best_timed_segments(const Plan& plan) {
  TimedSegments best{{}, predicted_picoseconds(plan)};
  if (!may_have_segments(plan)) return best;
  const Segments most = most_uniform(plan);
  const bool may_be_uniform = most.count > 1 && can_run_in_segments(plan, most);
  const bool may_be_non_uniform = static_cast<int64_t>(ranks_of(plan).size()) <= kMaxRanksInNonUniformSegments;
  if (!may_be_uniform && !may_be_non_uniform) return best;
  const Pipeline pipeline(plan);
  for (int64_t count = 2; may_be_uniform && count <= most.count; count *= 2) {
    const int64_t time = pipeline.picoseconds_divided(count);
    if (time < best.picoseconds) best = {{most.tensor_dim, count}, time};
  }
  if (may_be_non_uniform) try_non_uniform(plan, pipeline, best);
  return best;
}

int64_t segments_lower_bound(std::span<const int64_t> times, int64_t latencies) {
  int64_t longest = 0;
  int64_t all = 0;
  for (const int64_t time : times) {
    longest = std::max(longest, time);
    all = saturating_sum(all, time);
  }
  const double others = static_cast<double>(all - longest);
  const double others_and_latencies = 2 * std::sqrt(others * static_cast<double>(latencies));
  return longest + std::max<int64_t>(static_cast<int64_t>(others_and_latencies) - latencies, 0);
}

Segments best_segments(const Plan& plan) {
  return may_have_segments(plan) ? best_timed_segments(plan).segments : Segments();
}

}  // namespace shardwright
