#include "program/fit.h"

#include <algorithm>
#include <limits>

#include "layout/error.h"
#include "planner/cost.h"
#include "planner/serialize.h"
#include "program/program.h"

namespace shardwright {
namespace {

int64_t bytes_held(const Layout& layout) {
  return num_elements(layout.region(0)) * layout.dtype().size_bytes();  // parts are largest at position 0
}

// At least what the worst rank allocates, without compiling: what lies before and after, and all that goes packed.
int64_t peak_at_most(const Plan& plan) {
  int64_t peak = 0;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    int64_t bytes = (i > 0 ? bytes_held(step.before) : 0) + bytes_held(step.after);
    if (!is_local(step.op)) {
      const StepFigures figures = shardwright::figures(step, plan.backend);
      bytes += figures.sent_bytes + figures.received_bytes + 2 * bytes_held(step.before);
    }
    peak = std::max(peak, bytes);
  }
  return peak;
}

std::vector<int64_t> peaks_by_step(const Plan& plan) {
  std::vector<int64_t> worst(plan.steps.size(), 0);
  for (const int64_t position : seen_positions(plan.src.mesh())) {
    const std::vector<int64_t> peaks = compile(plan, position).peak_bytes_by_step();
    for (size_t i = 0; i < peaks.size(); ++i) worst[i] = std::max(worst[i], peaks[i]);
  }
  return worst;
}

// Rounds beyond this shorten messages more than they save memory.
constexpr int64_t kMostRounds = 256;

// The plan with as many rounds as the limit asks for; its peak, which is above the limit where none suffice.
std::pair<Plan, int64_t> in_rounds(Plan plan, int64_t limit) {
  std::vector<int64_t> before(plan.steps.size(), std::numeric_limits<int64_t>::max());
  while (true) {
    const std::vector<int64_t> peaks = peaks_by_step(plan);
    bool changed = false;
    for (size_t i = 0; i < peaks.size(); ++i) {
      Step& step = plan.steps[i];
      const int64_t most = std::min(kMostRounds, std::max<int64_t>(num_elements(step.after.region(0)), 1));
      if (peaks[i] <= limit || !may_go_in_rounds(step) || step.rounds >= most || peaks[i] >= before[i]) continue;
      step.rounds = std::min(2 * step.rounds, most);
      changed = true;
    }
    before = peaks;
    if (!changed) return {std::move(plan), peaks.empty() ? 0 : *std::max_element(peaks.begin(), peaks.end())};
  }
}

struct Ranking {
  int64_t first;
  int64_t steps;
  auto operator<=>(const Ranking&) const = default;
};

Ranking ranking_of(const Plan& plan) {
  const TrafficTotals traffic = totals(plan);
  return {plan.objective == Objective::kTime ? predicted_picoseconds(plan) : traffic.received_bytes_max, traffic.steps};
}

}  // namespace

int64_t peak_bytes(const Plan& plan) {
  const std::vector<int64_t> peaks = peaks_by_step(plan);
  return peaks.empty() ? 0 : *std::max_element(peaks.begin(), peaks.end());
}

Plan make_plan_within(const Layout& src, const Layout& dst, const PlanOptions& options,
                      std::optional<int64_t> memory_limit) {
  check_user(!memory_limit || *memory_limit >= 0, "memory_limit: ", memory_limit.value_or(0),
             " bytes; allowed is 0 or more");
  Plan fastest = make_plan(src, dst, options);
  const int64_t by_default = bytes_held(dst) + std::max(bytes_held(src), bytes_held(dst)) + kStagingBytes;
  const int64_t limit = memory_limit.value_or(by_default);
  if (peak_at_most(fastest) <= limit || peak_bytes(fastest) <= limit) return fastest;

  // The fastest way, the way of fewest bytes, which is mostly one move, and those by way of smaller layouts.
  std::vector<Plan> candidates;
  const int64_t item = src.dtype().size_bytes();
  const int64_t larger = std::max(bytes_held(src), bytes_held(dst)) / item;
  const int64_t smaller = std::min(bytes_held(src), bytes_held(dst)) / item;
  for (const Objective objective : {options.objective, Objective::kBytes}) {
    for (const int64_t max_held : {int64_t{0}, larger, smaller}) {
      PlanOptions other = options;
      other.objective = objective;
      other.max_held = max_held;
      try {
        Plan candidate = make_plan(src, dst, other);
        candidate.objective = options.objective;
        const bool is_new = std::none_of(candidates.begin(), candidates.end(),
                                         [&](const Plan& known) { return to_bytes(known) == to_bytes(candidate); });
        if (is_new) candidates.push_back(std::move(candidate));
      } catch (const UserError&) {  // the groups that are allowed lead over larger ones only
      }
    }
  }
  std::optional<std::pair<Ranking, Plan>> best;
  std::optional<std::pair<int64_t, Plan>> smallest;
  for (Plan& candidate : candidates) {
    auto [plan, peak] = in_rounds(std::move(candidate), limit);
    if (!smallest || peak < smallest->first) smallest = {peak, plan};
    if (peak > limit) continue;
    const Ranking ranking = ranking_of(plan);
    if (!best || ranking < best->first) best = {ranking, std::move(plan)};
  }
  if (best) return std::move(best->second);
  check_user(!memory_limit, "memory_limit: ", limit, " bytes do not suffice for ", src.to_string(), " -> ",
             dst.placements_string(), "; the least that does is ", smallest->first);
  return std::move(smallest->second);
}

}  // namespace shardwright
