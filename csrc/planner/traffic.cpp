// What moves travel: exact counts per rank, totals, and the lower bound.
#include <algorithm>

#include "layout/error.h"
#include "planner/exchange.h"
#include "planner/plan.h"

namespace shardwright {
namespace {

int64_t shared_elements(const Region& a, const Region& b) {
  int64_t total = 1;
  for (size_t t = 0; t < a.size() && total > 0; ++t) total *= intersection_length(a[t], b[t]);
  return total;
}

Traffic exchange_traffic(const Step& step, int64_t position) {
  Traffic traffic;
  const int64_t item = step.before.dtype().size_bytes();
  for (const int64_t source : sources_of(step, position)) {
    if (source == position) continue;
    const int64_t elements = transfer_elements(step, source, position);
    traffic.received_bytes += elements * item;
    traffic.messages += elements > 0;
  }
  for (const int64_t receiver : step.before.mesh().group(position, step.mesh_dims)) {
    if (receiver != position) traffic.sent_bytes += transfer_elements(step, position, receiver) * item;
  }
  return traffic;
}

Traffic reduce_scatter_traffic(const Step& step, int64_t position) {
  Traffic traffic;
  const int64_t item = step.before.dtype().size_bytes();
  const int64_t peers = step.before.mesh().group_size(step.mesh_dims) - 1;
  const int64_t kept = num_elements(step.after.region(position));
  traffic.received_bytes = peers * kept * item;
  traffic.sent_bytes = (num_elements(step.before.region(position)) - kept) * item;
  traffic.messages = kept > 0 ? peers : 0;
  return traffic;
}

// Native: the figure of a ring, rounded up. Composed: own chunk from every peer, then every peer's chunk; two ranks
// just trade all they have.
Traffic all_reduce_traffic(const Step& step, Backend backend, int64_t position) {
  Traffic traffic;
  const int64_t item = step.before.dtype().size_bytes();
  const int64_t n = num_elements(step.before.region(position));
  const int64_t k = step.before.mesh().group_size(step.mesh_dims);
  if (reduces_natively(step, backend)) {
    traffic.received_bytes = (2 * n * item * (k - 1) + k - 1) / k;
    traffic.sent_bytes = traffic.received_bytes;
    traffic.messages = n > 0 ? 2 * (k - 1) : 0;
    return traffic;
  }
  if (k == 2) return {n * item, n * item, n > 0 ? 1 : 0};
  const std::vector<int64_t> group = step.before.mesh().group(position, step.mesh_dims);
  const int64_t index = std::find(group.begin(), group.end(), position) - group.begin();
  const Interval mine = flat_chunk(n, k, index);
  const int64_t own = mine.end - mine.begin;
  traffic.received_bytes = ((k - 1) * own + n - own) * item;
  traffic.sent_bytes = traffic.received_bytes;
  for (int64_t m = 0; m < k; ++m) {
    const Interval chunk = flat_chunk(n, k, m);
    if (m != index && chunk.end > chunk.begin) ++traffic.messages;
  }
  if (own > 0) traffic.messages += k - 1;
  return traffic;
}

}  // namespace

Traffic traffic_at(const Step& step, Backend backend, int64_t position) {
  switch (step.op) {
    case StepOp::kSlice:
    case StepOp::kPartition:
    case StepOp::kZeroFill:
      return {};
    case StepOp::kAllGather:
    case StepOp::kAllToAll:
    case StepOp::kPermute:
    case StepOp::kExchange:
      return exchange_traffic(step, position);
    case StepOp::kReduceScatter:
      return reduce_scatter_traffic(step, position);
    case StepOp::kAllReduce:
      return all_reduce_traffic(step, backend, position);
  }
  throw InvariantError("unknown step op");
}

namespace {

void add_rank(TrafficTotals& totals, const Traffic& traffic) {
  totals.received_bytes_max = std::max(totals.received_bytes_max, traffic.received_bytes);
  totals.received_bytes_sum += traffic.received_bytes;
  totals.sent_bytes_max = std::max(totals.sent_bytes_max, traffic.sent_bytes);
  totals.messages_max = std::max(totals.messages_max, traffic.messages);
}

}  // namespace

TrafficTotals totals(const Step& step, Backend backend) {
  TrafficTotals result;
  for (int64_t p = 0; p < step.before.mesh().size(); ++p) add_rank(result, traffic_at(step, backend, p));
  return result;
}

TrafficTotals totals(const Plan& plan) {
  TrafficTotals result;
  for (int64_t p = 0; p < plan.src.mesh().size(); ++p) {
    Traffic all;
    for (const Step& step : plan.steps) {
      const Traffic traffic = traffic_at(step, plan.backend, p);
      all.received_bytes += traffic.received_bytes;
      all.sent_bytes += traffic.sent_bytes;
      all.messages += traffic.messages;
    }
    add_rank(result, all);
  }
  return result;
}

Bound lower_bound(const Layout& src, const Layout& dst) {
  const Mesh& mesh = src.mesh();
  const int64_t item = src.dtype().size_bytes();
  const MeshDimSet reduced = src.partial_dims() - dst.partial_dims();
  Bound bound;
  if (reduced.empty()) {
    const MeshDimSet zero_filled = src.cut_dims() & dst.partial_dims();
    if (!zero_filled.empty()) return bound;  // a rank may hold any share of the value, so nothing must travel
    for (int64_t p = 0; p < mesh.size(); ++p) {
      const Region needed = dst.region(p);
      const int64_t missing = num_elements(needed) - shared_elements(src.region(p), needed);
      bound.bytes_max = std::max(bound.bytes_max, missing * item);
      bound.bytes_sum += missing * item;
    }
    return bound;
  }
  // Dims partial in both keep separate sums, one per coordinate; dims that become partial may hold any share of the
  // value, so one holder along them is enough.
  const MeshDimSet kept = src.partial_dims() & dst.partial_dims();
  const int64_t slices = mesh.group_size(kept);
  const int64_t contributions = mesh.group_size(reduced);
  const int64_t holders = mesh.group_size(dst.replicated_dims());
  bound.bytes_sum = src.num_elements() * slices * (contributions - 1 + holders - 1) * item;
  bound.bytes_max = (bound.bytes_sum + mesh.size() - 1) / mesh.size();
  return bound;
}

}  // namespace shardwright
