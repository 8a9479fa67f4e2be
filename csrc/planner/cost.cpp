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

int64_t predicted_picoseconds(const Step& step, Backend backend) {
  const CostTable table = cost_table(backend);
  const Traffic traffic = traffic_at(step, backend, 0);
  const int64_t touched = num_elements(step.after.region(0)) * step.after.dtype().size_bytes();
  int64_t cost = touched / 1024 * table.memory_ps_per_kib + touched % 1024;
  if (is_local(step.op)) return cost;
  const int64_t wire = std::max(traffic.received_bytes, traffic.sent_bytes);
  cost += table.step_ps + traffic.messages * table.message_ps;
  cost += wire / 1024 * table.ps_per_kib + wire % 1024 * table.ps_per_kib / 1024;
  return cost;
}

int64_t predicted_picoseconds(const std::vector<Step>& steps, Backend backend) {
  int64_t total = 0;
  for (const Step& step : steps) total += predicted_picoseconds(step, backend);
  return total;
}

}  // namespace shardwright
