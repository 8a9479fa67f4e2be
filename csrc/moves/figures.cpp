#include "moves/figures.h"

#include <algorithm>

#include "crossing/rearrangement.h"
#include "moves/extremes.h"
#include "moves/move_table.h"
#include "moves/traffic.h"

namespace shardwright {
namespace {

// Whether first coordinates hold the most wherever they are taken.
bool first_hold_most(const Layout& layout) {
  return std::all_of(layout.cuts().begin(), layout.cuts().end(), [](const std::vector<Cut>& cuts) {
    return std::all_of(cuts.begin(), cuts.end(), [](const Cut& c) { return c.rule.descends(); });
  });
}

// Over the classes of ranks in the group of first coordinates, or in all groups.
StepFigures figures_by_walking(const Step& step, Lowering lowering) {
  StepFigures worst;
  const StepTraffic traffic(step, lowering);
  const int64_t item = step.before.dtype().size_bytes();
  const Mesh& mesh = step.before.mesh();
  const bool one_group_is_enough = first_hold_most(step.before) && first_hold_most(step.after);
  RankClasses classes(mesh);
  traffic.tell_apart(classes);
  for (const int64_t position : classes.seen().positions) {
    bool is_looked_at = true;
    for (int d = 0; d < mesh.ndim() && one_group_is_enough; ++d) {
      is_looked_at = is_looked_at && (step.mesh_dims.contains(d) || mesh.coordinate(position, d) == 0);
    }
    if (!is_looked_at) continue;
    const Traffic one = traffic.at(position);
    worst.received_bytes = std::max(worst.received_bytes, one.received_bytes);
    worst.sent_bytes = std::max(worst.sent_bytes, one.sent_bytes);
    worst.messages = std::max(worst.messages, one.messages);
    worst.touched_bytes = std::max(worst.touched_bytes, num_elements(step.after.region(position)) * item);
  }
  worst.collectives =
      collectives_of(step.op, step.before.mesh().group_size(step.mesh_dims), reduces_natively(step, lowering));
  return worst;
}

}  // namespace

Link link_of(const Crossing& crossing, const Topology& topology) {
  return crossing.crosses_nodes(topology.ranks_per_node) ? topology.between : topology.inside;
}

namespace {

Link link_of(const Step& step, const Topology& topology) {
  if (step.op == StepOp::kCross) return link_of(Crossing(step.before, step.after, step.sharing), topology);
  if (step.op != StepOp::kRearrange) return topology.link(step.before.mesh(), step.mesh_dims);
  const Rearrangement move(step.before, step.after, step.sharing);
  return move.crosses_nodes(topology.ranks_per_node) ? topology.between : topology.inside;
}

}  // namespace

StepFigures figures(const Step& step, Lowering lowering) {
  if (step.op == StepOp::kCross) return Crossing(step.before, step.after, step.sharing).totals(step.rounds).worst;
  if (step.op == StepOp::kRearrange) return Rearrangement(step.before, step.after, step.sharing).worst(step.rounds);
  if (step.sharing == Sharing::kBytes || step.rounds > 1) return figures_by_walking(step, lowering);
  MoveTable table(step.before, lowering, step.ordered);
  const MoveTable::State before = table.state(step.before.cuts(), step.before.partial_dims());
  const MoveTable::State after = table.state(step.after.cuts(), step.after.partial_dims());
  return table.figures(before, after, {step.op, step.mesh_dims, step.sharing});
}

int64_t predicted_picoseconds(const Step& step, const StepFigures& figures, const Topology& topology) {
  if (is_crossing(step.op) && figures.messages == 0) return predicted_picoseconds(true, figures, {}, topology);
  const Link link = link_of(step, topology);
  const int64_t first = predicted_picoseconds(is_local(step.op), figures, link, topology);
  return saturating_sum(first, saturating_product((step.rounds - 1) * figures.collectives, topology.step_ps));
}

int64_t predicted_picoseconds(const Step& step, Lowering lowering, const Topology& topology) {
  return predicted_picoseconds(step, figures(step, lowering), topology);
}

int64_t predicted_picoseconds(const Plan& plan) {
  int64_t total = 0;
  for (const Step& step : plan.steps) {
    total = saturating_sum(total, predicted_picoseconds(step, plan.lowering, plan.topology));
  }
  return total;
}

}  // namespace shardwright
