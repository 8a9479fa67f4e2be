#include "planner/cost.h"

#include <algorithm>

#include "planner/move_table.h"

namespace shardwright {
namespace {

constexpr int64_t kCeiling = int64_t{1} << 60;

}  // namespace

int64_t scaled(int64_t bytes, int64_t ps_per_kib) {
  const auto exact = static_cast<__int128>(bytes) * ps_per_kib / 1024;
  return exact > kCeiling ? kCeiling : static_cast<int64_t>(exact);
}

int64_t saturating_sum(int64_t a, int64_t b) { return std::min(a + b, kCeiling); }

StepFigures figures(const Step& step, Backend backend) {
  MoveTable table(step.before, backend, step.ordered);
  const MoveTable::State before = table.state(step.before.cuts(), step.before.partial_dims());
  const MoveTable::State after = table.state(step.after.cuts(), step.after.partial_dims());
  return table.figures(before, after, {step.op, step.mesh_dims});
}

int64_t predicted_picoseconds(bool local, const StepFigures& figures, const Link& link, const Topology& topology) {
  const int64_t copies = scaled(figures.touched_bytes, topology.memory_ps_per_kib);
  if (local) return copies;
  const int64_t wire = scaled(std::max(figures.received_bytes, figures.sent_bytes), link.ps_per_kib);
  const int64_t latency = saturating_sum(topology.step_ps, scaled(figures.messages * 1024, link.message_ps));
  return saturating_sum(saturating_sum(copies, wire), latency);
}

int64_t predicted_picoseconds(const Step& step, const StepFigures& figures, const Topology& topology) {
  return predicted_picoseconds(is_local(step.op), figures, topology.link(step.before.mesh(), step.mesh_dims), topology);
}

int64_t predicted_picoseconds(const Step& step, Backend backend, const Topology& topology) {
  return predicted_picoseconds(step, figures(step, backend), topology);
}

int64_t predicted_picoseconds(const Plan& plan) {
  int64_t total = 0;
  for (const Step& step : plan.steps) {
    total = saturating_sum(total, predicted_picoseconds(step, plan.backend, plan.topology));
  }
  return total;
}

}  // namespace shardwright
