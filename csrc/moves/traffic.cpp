#include "moves/traffic.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include "exchange/bounds.h"
#include "exchange/digits.h"
#include "moves/segments.h"
#include "moves/step_exchange.h"
#include "support/ceil_divide.h"
#include "support/error.h"

namespace shardwright {

StepTraffic::StepTraffic(const Step& step, Lowering lowering) : step_(step) {
  if (is_cross_or_rearrange(step.op)) {
    exchange_ = exchange_of(step);
  } else {
    on_mesh_.emplace(step, lowering);
  }
}

Traffic StepTraffic::at(Rank rank) const {
  if (exchange_) return exchange_->traffic(rank, step_.rounds);
  const std::optional<Position> position = step_.before.mesh().position_of(rank);
  return position ? on_mesh_->at(*position) : Traffic{};
}

bool StepTraffic::communicates() const { return exchange_ ? exchange_->communicates() : !is_local(step_.op); }

Traffic traffic_at(const Step& step, Lowering lowering, Rank rank) { return StepTraffic(step, lowering).at(rank); }

namespace {

// Returns the traffic of `count` equal moves.
Traffic multiplied(const Traffic& traffic, int64_t count) {
  return {traffic.received_bytes * count, traffic.sent_bytes * count, traffic.messages * count,
          traffic.sent_messages * count};
}

}  // namespace

Traffic traffic_at(const Plan& plan, Rank rank) {
  if (plan.segments.count > 1) {
    const std::vector<Plan> segments = plans_of_segments(plan);
    Traffic all;
    for (const Plan& segment : segments) all = all + traffic_at(segment, rank);
    return multiplied(all, plan.segments.count / static_cast<int64_t>(segments.size()));
  }
  Traffic all;
  for (const Step& step : plan.steps) all = all + traffic_at(step, plan.lowering, rank);
  return all;
}

MeshStepTraffic::MeshStepTraffic(const Step& step, Lowering lowering)
    : step_(step), exchange_(mesh_exchange_of(step)), is_native_(reduces_natively(step, lowering)) {}

Traffic MeshStepTraffic::at(int64_t position) const {
  const Mesh& mesh = step_.before.mesh();
  const int64_t item = step_.before.dtype().size_bytes();
  switch (step_.op) {
    case StepOp::kSlice:
    case StepOp::kPartition:
    case StepOp::kZeroFill:
      return {};
    case StepOp::kCross:
    case StepOp::kRearrange:
      break;
    case StepOp::kAllGather:
    case StepOp::kAllToAll:
    case StepOp::kPermute:
    case StepOp::kExchange:
      return exchange_.traffic_at(position);
    case StepOp::kReduceScatter: {
      const int64_t num_kept = exchange_.num_needed(position);
      Traffic traffic =
          reduce_scatter_traffic(exchange_.num_held(position), num_kept, mesh.group_size(step_.mesh_dims), item);
      traffic.messages *= std::min(step_.rounds, std::max<int64_t>(num_kept, 1));
      traffic.sent_messages =
          step_.after.has_equal_parts() ? traffic.messages : exchange_.reduce_scatter_messages(position);
      return traffic;
    }
    case StepOp::kAllReduce: {
      const int64_t num_held = exchange_.num_held(position);
      const int64_t k = mesh.group_size(step_.mesh_dims);
      if (is_native_) return all_reduce_traffic(num_held, k, 0, item, true);
      const int64_t index = index_in_group(mesh, position, step_.mesh_dims);
      Traffic traffic;
      for (int64_t round = 0; round < step_.rounds; ++round) {
        const Interval range = in_round({0, num_held}, round, step_.rounds);
        const Traffic round_traffic = all_reduce_traffic(range.end - range.begin, k, index, item, false);
        traffic = traffic + round_traffic;
      }
      return traffic;
    }
  }
  throw InvariantError(concat("MeshStepTraffic was used for a step that is not on one mesh: ", step_op_name(step_.op)));
}

void MeshStepTraffic::split_classes(RankClasses& classes) const {
  classes.add(step_);
  if (step_.op != StepOp::kAllReduce || is_native_) return;
  // The flat range is divided into chunks, which differ in length if the range is not a multiple of ranks x rounds.
  const int64_t chunks = step_.before.mesh().group_size(step_.mesh_dims) * step_.rounds;
  const bool are_equal = step_.before.has_equal_parts() && step_.before.largest_part_elements() % chunks == 0;
  if (!are_equal) classes.split_all(step_.mesh_dims);
}

std::optional<Traffic> MeshStepTraffic::upper_bound() const {
  if (!step_.before.has_equal_parts() || !step_.after.has_equal_parts()) return std::nullopt;
  // The first member of a group sums a chunk that is at least as large as any other chunk.
  if (step_.op == StepOp::kAllReduce && !is_native_ && !ranks_ascend(step_.before.mesh())) return std::nullopt;
  if (step_.op == StepOp::kReduceScatter || step_.op == StepOp::kAllReduce) return at(0);
  return exchange_.upper_bound();
}

namespace {

// Returns the sum over all ranks of the elements that they hold.
int64_t total_held_elements(const Layout& layout) {
  return layout.num_elements() * (layout.mesh().size() / layout.mesh().group_size(layout.cut_dims()));
}

// Returns the bytes that all ranks together receive in a step, without visiting ranks; nullopt if there is no formula.
std::optional<int64_t> total_received_bytes(const Step& step, Lowering lowering) {
  const int64_t item = step.before.dtype().size_bytes();
  const int64_t k = step.before.mesh().group_size(step.mesh_dims);
  if (step.op == StepOp::kReduceScatter) return (k - 1) * total_held_elements(step.after) * item;
  if (step.op == StepOp::kAllReduce) {
    if (!reduces_natively(step, lowering)) return 2 * (k - 1) * (total_held_elements(step.before) / k) * item;
    if (!step.before.has_equal_parts()) return std::nullopt;  // each rank's count is rounded separately
    return all_reduce_traffic(step.before.largest_part_elements(), k, 0, item, true).received_bytes *
           step.before.mesh().size();
  }
  const std::optional<int64_t> kept = SharedElements(step.before, step.after).sum();
  if (!kept) return std::nullopt;
  return (total_held_elements(step.after) - *kept) * item;
}

// Returns true if the maxima over the examined ranks equal the upper bounds of these steps, and are therefore exact.
bool equal_upper_bounds(const TrafficTotals& totals, const std::deque<MeshStepTraffic>& steps) {
  Traffic most;
  for (const MeshStepTraffic& step : steps) {
    const std::optional<Traffic> step_traffic = step.upper_bound();
    if (!step_traffic) return false;
    most = most + *step_traffic;
  }
  return totals.received_bytes_max == most.received_bytes && totals.sent_bytes_max == most.sent_bytes &&
         totals.messages_max == most.messages && totals.sent_messages_max == most.sent_messages;
}

}  // namespace

bool communicates(const Step& step) {
  return is_cross_or_rearrange(step.op) ? StepTraffic(step, Lowering()).communicates() : !is_local(step.op);
}

TrafficTotals totals(const Step& step, Lowering lowering) {
  return totals(Plan{step.before, step.after, lowering, Objective::kTime, {}, false, {step}});
}

namespace {

// Returns the traffic of all steps of a plan, from that of its steps that are not local.
std::vector<TrafficTotals::OfStep> with_local_steps(const Plan& plan,
                                                    const std::vector<TrafficTotals::OfStep>& communicating) {
  std::vector<TrafficTotals::OfStep> all;
  for (auto next = communicating.begin(); const Step& step : plan.steps) {
    all.push_back(is_local(step.op) ? TrafficTotals::OfStep() : *next++);
  }
  return all;
}

// Returns the totals of a plan with a crossing or a rearrangement. Examines the ranks of both meshes one by one.
TrafficTotals totals_between_meshes(const Plan& plan) {
  const std::vector<Plan> plans = plan.segments.count > 1 ? plans_of_segments(plan) : std::vector<Plan>{plan};
  std::deque<StepTraffic> steps;
  std::vector<bool> communicates(plan.steps.size(), false);
  for (const Plan& segment_plan : plans) {
    for (size_t i = 0; i < segment_plan.steps.size(); ++i) {
      if (is_local(segment_plan.steps[i].op)) continue;
      steps.emplace_back(segment_plan.steps[i], segment_plan.lowering);
      communicates[i] = communicates[i] || steps.back().communicates();
    }
  }
  TrafficTotals result;
  result.steps = plan.segments.count - 1;
  for (size_t i = 0; i < plan.steps.size(); ++i) result.steps += communicates[i] ? plan.steps[i].rounds : 0;
  std::vector<TrafficTotals::OfStep> of_steps(steps.size());
  for (const Rank rank : ranks_of(plan)) {
    Traffic all;
    for (size_t s = 0; s < steps.size(); ++s) {
      const Traffic traffic = steps[s].at(rank);
      of_steps[s].add(traffic);
      all = all + traffic;
    }
    result.add(multiplied(all, plan.segments.count / static_cast<int64_t>(plans.size())));
  }
  if (plan.segments.count == 1) result.of_steps = with_local_steps(plan, of_steps);
  return result;
}

}  // namespace

// On one mesh, examines one rank of each class. If the classes are too many, computes the sum by a formula.
TrafficTotals totals(const Plan& plan) {
  const bool has_crossing = std::any_of(plan.steps.begin(), plan.steps.end(),
                                        [](const Step& step) { return is_cross_or_rearrange(step.op); });
  if (has_crossing || crosses(plan)) return totals_between_meshes(plan);
  const Mesh& mesh = plan.src.mesh();
  std::deque<MeshStepTraffic> steps;
  RankClasses classes(mesh);
  for (const Step& step : plan.steps) {
    if (is_local(step.op)) continue;
    steps.emplace_back(step, plan.lowering);
    steps.back().split_classes(classes);
  }
  const RankSample sample = classes.sample();
  TrafficTotals result;
  for (const MeshStepTraffic& step : steps) result.steps += step.step().rounds;
  std::vector<TrafficTotals::OfStep> of_steps(steps.size());
  for (size_t i = 0; i < sample.positions.size(); ++i) {
    Traffic all;
    for (size_t s = 0; s < steps.size(); ++s) {
      const Traffic traffic = steps[s].at(sample.positions[i]);
      of_steps[s].add(traffic);
      all = all + traffic;
    }
    result.add(all, sample.weights[i]);
  }
  if (sample.is_complete || steps.size() == 1) result.of_steps = with_local_steps(plan, of_steps);
  if (sample.is_complete) return result;
  result.received_bytes_sum = 0;
  for (size_t s = 0; s < steps.size(); ++s) {
    const std::optional<int64_t> sum = total_received_bytes(steps[s].step(), plan.lowering);
    result.sum_is_exact = result.sum_is_exact && sum;
    result.received_bytes_sum += sum ? *sum : of_steps[s].received_bytes_max * mesh.size();
  }
  result.maxima_are_exact = equal_upper_bounds(result, steps);
  return result;
}

Bound lower_bound(const Layout& src, const Layout& dst) {
  if (!(src.mesh() == dst.mesh()) || needs_rearrangement(src, dst)) {
    const ExchangeBound bound = exchange_bound(src, dst);
    return {bound.received_bytes_max, bound.received_bytes_sum};
  }
  const Mesh& mesh = src.mesh();
  const int64_t item = src.dtype().size_bytes();
  const MeshDimSet reduced = src.partial_dims() - dst.partial_dims();
  Bound bound;
  if (reduced.empty()) {
    // Ranks that differ only in mesh dims that become partial may hold any shares that add up to the value. If these
    // mesh dims cut the source, nothing has to be sent. Otherwise these ranks lack the same elements, and each of these
    // elements must be received by at least one of the ranks.
    const MeshDimSet becomes_partial = dst.partial_dims() - src.partial_dims();
    if (!(src.cut_dims() & becomes_partial).empty()) return bound;
    const SharedElements shared(src, dst);
    const bool has_digits = !shared.matchings().empty();  // then all parts of `dst` have one size
    const int64_t part_elements = dst.largest_part_elements();
    RankClasses classes(mesh);
    classes.add(src, dst);
    const RankSample sample = classes.sample();
    KnownParts held(src);
    KnownParts needed(dst);
    const auto missing_at = [&](int64_t position) {
      if (has_digits) return part_elements - shared.at(position);
      int64_t own = 1;
      for (int t = 0; t < src.ndim(); ++t) {
        own *= intersection_length(held.at(t, position).list, needed.at(t, position).list);
      }
      return needed.num_elements(position) - own;
    };
    for (size_t i = 0; i < sample.positions.size(); ++i) {
      const int64_t missing = missing_at(sample.positions[i]);
      bound.bytes_max = std::max(bound.bytes_max, missing * item);
      bound.bytes_sum += missing * item * sample.weights[i];
    }
    if (!sample.is_complete) {
      const std::optional<int64_t> kept = shared.sum();
      bound.bytes_sum = kept ? (total_held_elements(dst) - *kept) * item : bound.bytes_max;
    }
    const int64_t shares = mesh.group_size(becomes_partial);
    bound.bytes_max = ceil_divide(bound.bytes_max, shares);
    bound.bytes_sum = ceil_divide(bound.bytes_sum, shares);
    return bound;
  }
  // Mesh dims that are partial in both layouts keep separate sums, one per coordinate. Along mesh dims that become
  // partial, ranks may hold any share of the value, so one replica is enough.
  const MeshDimSet kept = src.partial_dims() & dst.partial_dims();
  const int64_t slices = mesh.group_size(kept);
  const int64_t contributions = mesh.group_size(reduced);
  const int64_t replicas = mesh.group_size(dst.replicated_dims());
  bound.bytes_sum = src.num_elements() * slices * (contributions - 1 + replicas - 1) * item;
  bound.bytes_max = (bound.bytes_sum + mesh.size() - 1) / mesh.size();
  return bound;
}

}  // namespace shardwright
