#include "planner/cost.h"

#include <algorithm>

namespace shardwright {

CostTable cost_table(Backend backend) {
  switch (backend) {
    case Backend::kNccl:
      return {12'000'000, 1'000'000, 5'120, 683};  // 12 us, 1 us, 200 GB/s, 1.5 TB/s
    case Backend::kGloo:
      return {150'000'000, 40'000'000, 512'000, 204'800};  // 150 us, 40 us, 2 GB/s, 5 GB/s
  }
  return {};
}

namespace {

int64_t rank_picoseconds(const Step& step, Backend backend, int64_t position) {
  const CostTable table = cost_table(backend);
  const Traffic traffic = traffic_at(step, backend, position);
  const int64_t touched = num_elements(step.after.region(position)) * step.after.dtype().size_bytes();
  int64_t cost = touched / 1024 * table.memory_ps_per_kib + touched % 1024;
  if (is_local(step.op)) return cost;
  const int64_t wire = std::max(traffic.received_bytes, traffic.sent_bytes);
  cost += table.step_ps + traffic.messages * table.message_ps;
  cost += wire / 1024 * table.ps_per_kib + wire % 1024 * table.ps_per_kib / 1024;
  return cost;
}

}  // namespace

int64_t predicted_picoseconds(const Step& step, Backend backend) {
  if (is_local(step.op)) return rank_picoseconds(step, backend, 0);
  const std::vector<int64_t> group = step.before.mesh().group(0, step.mesh_dims);
  const int64_t count = std::min(kMaxCostRanks, static_cast<int64_t>(group.size()));
  int64_t worst = 0;
  for (int64_t m = 0; m < count; ++m) worst = std::max(worst, rank_picoseconds(step, backend, group[m]));
  return worst;
}

int64_t predicted_picoseconds(const std::vector<Step>& steps, Backend backend) {
  int64_t total = 0;
  for (const Step& step : steps) total += predicted_picoseconds(step, backend);
  return total;
}

}  // namespace shardwright
