#include "planning/memory_limit.h"

#include <algorithm>
#include <limits>

#include "cost/cost.h"
#include "moves/collectives.h"
#include "moves/rank_classes.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "planning/serialize.h"
#include "program/memory.h"
#include "search/make_plan.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Returns true if every rank of a gather sends its part from the tensor itself. A part that is several runs of the
// result may be packed, once for each receiver.
bool gathers_in_place(const Layout& before) {
  return before.has_equal_parts() || std::all_of(before.cuts().begin(), before.cuts().end(), [](const auto& cuts) {
           return std::all_of(cuts.begin(), cuts.end(), [](const Cut& cut) { return cut.rule.makes_runs(); });
         });
}

// Returns an upper bound on the bytes that a rank allocates in a step besides the parts before and after it: staging
// buffers for messages and contributions.
int64_t max_staging_bytes(const Step& step, const Lowering& lowering) {
  if (is_local(step.op)) return 0;
  const bool reduces = step.op == StepOp::kAllReduce || step.op == StepOp::kReduceScatter;
  const int64_t held_bytes = step.before.largest_part_bytes();
  if (reduces) {
    const Placement& placement = step.before.placements()[step.mesh_dims.to_vector().front()];
    const int64_t power_bytes = placement.op == ReduceOp::kNorm ? held_bytes : 0;  // the contribution's powers
    const int64_t k = step.before.mesh().group_size(step.mesh_dims);
    const int64_t received = k * step.after.largest_part_bytes();
    const bool is_native = reduces_natively(step, lowering);
    if (step.op == StepOp::kAllReduce) {
      // Every rank receives one share per rank; the longest share is rounded up.
      const int64_t item = step.before.dtype().size_bytes();
      return is_native ? 0 : power_bytes + held_bytes + (held_bytes / item + k - 1) / k * k * item;
    }
    return power_bytes + held_bytes + (is_native && step.after.has_equal_parts() ? 0 : received);
  }
  const StepCounts wire = step_counts(step, lowering);
  const int64_t own = step.op == StepOp::kAllGather ? held_bytes : 0;
  const bool is_sent_in_place = step.op == StepOp::kAllGather && lowering.gathers && gathers_in_place(step.before);
  return (is_sent_in_place ? 0 : wire.sent_bytes) + wire.received_bytes + own;
}

// Returns an upper bound on the bytes that the worst rank allocates, from the sizes of the largest parts alone.
int64_t peak_upper_bound(const Plan& plan) {
  if (plan.segments.count > 1) return std::numeric_limits<int64_t>::max();
  int64_t peak = 0;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    const int64_t before = i > 0 ? step.before.largest_part_bytes() : 0;
    peak = std::max(peak, before + step.after.largest_part_bytes() + max_staging_bytes(step, plan.lowering));
  }
  return peak;
}

// Maximum number of classes of ranks that are examined without a limit. With a limit it is kMaxRanksExamined.
constexpr int64_t kMaxRanksExaminedWithoutLimit = 64;

// Returns the peak memory of the worst rank examined, by step. Examines fewer ranks without a limit.
std::vector<int64_t> peaks_by_step(const Plan& plan, bool has_limit) {
  return ProgramMemory(plan)
      .max_peak_bytes_by_step(has_limit ? kMaxRanksExamined : kMaxRanksExaminedWithoutLimit)
      .bytes;
}

// Returns the largest peak, 0 if there are no steps.
int64_t largest(const std::vector<int64_t>& peaks) {
  return peaks.empty() ? 0 : *std::max_element(peaks.begin(), peaks.end());
}

// Maximum number of rounds that are tried. More rounds shorten messages but save little memory.
constexpr int64_t kMostRoundsTried = 256;

// Doubles the rounds of each step whose peak is above `limit` bytes until the peak fits or does not fall any more.
// Returns the plan and its peak in bytes, which is above the limit if no number of rounds suffices. The peak of a step
// depends only on its own rounds, so each pass tries more rounds for all steps at once.
std::pair<Plan, int64_t> split_into_rounds(Plan plan, int64_t limit, bool has_limit) {
  // The lowest peak of a step so far, and its number of rounds.
  struct Best {
    int64_t peak = std::numeric_limits<int64_t>::max();
    int64_t rounds = 1;
    bool is_final = false;  // no more rounds are tried
  };
  std::vector<Best> best(plan.steps.size());
  std::vector<int64_t> previous(plan.steps.size(), std::numeric_limits<int64_t>::max());
  for (bool changed = true; changed;) {
    const std::vector<int64_t> peaks = peaks_by_step(plan, has_limit);
    changed = false;
    for (size_t i = 0; i < peaks.size(); ++i) {
      Step& step = plan.steps[i];
      if (peaks[i] < best[i].peak) best[i] = {peaks[i], step.rounds};
      if (best[i].is_final || best[i].peak <= limit || !can_run_in_rounds(step, plan.lowering)) continue;
      const int64_t most = std::min(kMostRoundsTried, std::max<int64_t>(step.after.largest_part_elements(), 1));
      // Two rounds may save nothing, because the result already exists while the second round runs. So four are tried.
      best[i].is_final = step.rounds >= most || (step.rounds > 2 && peaks[i] >= previous[i]);
      step.rounds = best[i].is_final ? best[i].rounds : std::min(2 * step.rounds, most);
      changed = changed || !best[i].is_final;
    }
    previous = peaks;
  }
  int64_t peak = 0;
  for (const Best& step_best : best) peak = std::max(peak, step_best.peak);
  return {std::move(plan), peak};
}

// The cost by which plans within the limit are compared.
struct Ranking {
  int64_t cost;  // picoseconds or received bytes, by the objective
  int64_t steps;
  auto operator<=>(const Ranking&) const = default;
};

// Returns the cost of a plan by its objective.
Ranking ranking_of(const Plan& plan) {
  const TrafficTotals traffic = totals(plan);
  return {plan.objective == Objective::kTime ? predicted_picoseconds(plan) : traffic.received_bytes_max, traffic.steps};
}

}  // namespace

PeakBytes max_peak_bytes(const Plan& plan) {
  const ProgramMemory::MaxPeaks maxima = ProgramMemory(plan).max_peak_bytes_by_step(kMaxRanksExamined);
  return {largest(maxima.bytes), maxima.is_exact};
}

int64_t peak_bytes(const Plan& plan) { return max_peak_bytes(plan).bytes; }

// First makes the plan without a limit. If it needs too much memory, splits several candidate plans into rounds.
Plan make_plan_within(const Layout& src, const Layout& dst, const PlanOptions& options,
                      std::optional<int64_t> memory_limit) {
  check_argument(!memory_limit || *memory_limit >= 0, "memory_limit", "at least 0 bytes", memory_limit.value_or(0));
  Plan fastest = make_plan(src, dst, options);
  const int64_t default_limit =
      dst.largest_part_bytes() + std::max(src.largest_part_bytes(), dst.largest_part_bytes()) + kStagingBytes;
  const int64_t limit = memory_limit.value_or(default_limit);
  const bool has_limit = memory_limit.has_value();
  if (peak_upper_bound(fastest) <= limit || largest(peaks_by_step(fastest, has_limit)) <= limit) return fastest;

  // The candidates are the plan for the given objective, the plan with the fewest bytes (usually one move), and for
  // each of these, two plans with smaller intermediate layouts.
  std::vector<Plan> candidates;
  const int64_t item = src.dtype().size_bytes();
  const int64_t larger_part = std::max(src.largest_part_bytes(), dst.largest_part_bytes()) / item;  // in elements
  const int64_t smaller_part = std::min(src.largest_part_bytes(), dst.largest_part_bytes()) / item;
  for (const Objective objective : {options.objective, Objective::kBytes}) {
    for (const int64_t max_held : {int64_t{0}, larger_part, smaller_part}) {
      PlanOptions candidate_options = options;
      candidate_options.objective = objective;
      candidate_options.max_held = max_held;
      candidate_options.segments = false;  // these plans are split into rounds instead
      try {
        Plan candidate = make_plan(src, dst, candidate_options);
        candidate.objective = options.objective;
        const bool is_new = std::none_of(candidates.begin(), candidates.end(),
                                         [&](const Plan& known) { return to_bytes(known) == to_bytes(candidate); });
        if (is_new) candidates.push_back(std::move(candidate));
      } catch (const UserError&) {  // with the allowed groups, every plan needs larger layouts
      }
    }
  }
  std::optional<std::pair<Ranking, Plan>> best;      // the cheapest plan within the limit
  std::optional<std::pair<int64_t, Plan>> smallest;  // the plan with the lowest peak
  for (Plan& candidate : candidates) {
    auto [plan, peak] = split_into_rounds(std::move(candidate), limit, has_limit);
    if (!smallest || peak < smallest->first) smallest = {peak, plan};
    if (peak > limit) continue;
    const Ranking ranking = ranking_of(plan);
    if (!best || ranking < best->first) best = {ranking, std::move(plan)};
  }
  if (best) return std::move(best->second);
  check_user(!memory_limit, "memory_limit must be at least ", smallest->first, " bytes for ", src, " -> ",
             dst.placements_string(), ", got ", limit);
  return std::move(smallest->second);
}

}  // namespace shardwright
