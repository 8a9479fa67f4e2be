#include "moves/describe.h"

#include "moves/step_counts.h"
#include "support/error.h"
#include "support/text.h"

namespace shardwright {

std::string to_string(const Plan& plan, const TrafficTotals* traffic) {
  std::string text = concat(ends_of(plan), ", ", plan.lowering.name, ", least ", objective_name(plan.objective), " on ",
                            plan.topology.name);
  if (plan.steps.empty()) return text + "\n  nothing to do: every rank holds what it needs";
  // Returns the traffic of the worst rank in step i.
  const auto maxima_of = [&](size_t i) -> TrafficTotals::OfStep {
    if (traffic != nullptr && !traffic->of_steps.empty()) return traffic->of_steps[i];
    const TrafficTotals all = totals(plan.steps[i], plan.lowering);
    return {all.received_bytes_max, all.messages_max};
  };
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    text += concat("\n  ", i + 1, ". ", step_name(step), ": ", step.before.placements_string(), " -> ",
                   step.after.placements_string());
    if (step.ordered) text += ", in rank order";
    if (step.policy != ReplicaPolicy::kAligned && !is_cross_or_rearrange(step.op))
      text += ", replicas share the sending";
    if (step.policy == ReplicaPolicy::kNodeLocal) text += ", from senders on the same node first";
    if (step.rounds > 1) text += concat(", in ", step.rounds, " rounds");
    if (is_local(step.op)) {
      text += ", local";
      continue;
    }
    const auto [received_bytes, messages] = maxima_of(i);
    text += concat(", receives at most ", bytes_text(received_bytes), " in ", messages, " messages, about ",
                   microseconds_text(predicted_picoseconds(step, plan.lowering, plan.topology)));
  }
  if (plan.segments.count > 1) {
    text += concat("\n  in ", plan.segments.count, " segments of dim ", plan.segments.tensor_dim,
                   ", each one step behind the one before it, about ", microseconds_text(predicted_picoseconds(plan)));
  }
  return text;
}

}  // namespace shardwright
