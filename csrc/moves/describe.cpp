#include "moves/describe.h"

#include <algorithm>

#include "moves/figures.h"
#include "support/error.h"
#include "support/text.h"

namespace shardwright {

std::string to_string(const Plan& plan, const TrafficTotals* traffic) {
  std::string text = concat(ends_of(plan), ", ", plan.lowering.name, ", least ", objective_name(plan.objective), " on ",
                            plan.topology.name);
  if (plan.steps.empty()) return text + "\n  nothing to do: every rank holds what it needs";
  const auto communicating =
      std::count_if(plan.steps.begin(), plan.steps.end(), [](const Step& step) { return !is_local(step.op); });
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    text += concat("\n  ", i + 1, ". ", named(step), ": ", step.before.placements_string(), " -> ",
                   step.after.placements_string());
    if (step.ordered) text += ", in rank order";
    if (step.sharing != Sharing::kNone && !is_crossing(step.op)) text += ", replicas share the sending";
    if (step.sharing == Sharing::kNodes) text += ", from the own node first";
    if (step.rounds > 1) text += concat(", in ", step.rounds, " rounds");
    if (is_local(step.op)) {
      text += ", local";
      continue;
    }
    const bool is_all = traffic != nullptr && communicating == 1 && plan.segments.count == 1;
    const TrafficTotals t = is_all ? *traffic : totals(step, plan.lowering);
    text += concat(", receives at most ", bytes_text(t.received_bytes_max), " in ", t.messages_max, " messages, about ",
                   microseconds_text(predicted_picoseconds(step, plan.lowering, plan.topology)));
  }
  if (plan.segments.count > 1) {
    text += concat("\n  in ", plan.segments.count, " segments of dim ", plan.segments.tensor_dim,
                   ", each one step behind the one before it, about ", microseconds_text(predicted_picoseconds(plan)));
  }
  return text;
}

}  // namespace shardwright
