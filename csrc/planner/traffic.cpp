// What moves travel: exact counts per rank, totals, and the lower bound.
#include <algorithm>
#include <optional>

#include "layout/error.h"
#include "planner/exchange.h"
#include "planner/plan.h"

namespace shardwright {

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
      return reduce_scatter_traffic(num_elements(step.before.region(position)),
                                    num_elements(step.after.region(position)),
                                    step.before.mesh().group_size(step.mesh_dims), step.before.dtype().size_bytes());
    case StepOp::kAllReduce: {
      const std::vector<int64_t> group = step.before.mesh().group(position, step.mesh_dims);
      return all_reduce_traffic(num_elements(step.before.region(position)), static_cast<int64_t>(group.size()),
                                std::find(group.begin(), group.end(), position) - group.begin(),
                                step.before.dtype().size_bytes(), reduces_natively(step, backend));
    }
  }
  throw InvariantError("unknown step op");
}

namespace {

// More combinations of coordinates than this are not summed over one by one.
constexpr int64_t kMaxCombinations = int64_t{1} << 18;

// Sum over all ranks of the elements that one holds in both layouts. Tensor dims that no mesh dim couples multiply, so
// only the coordinates within each set of coupled ones are walked. Nothing where these are too many.
std::optional<int64_t> shared_by_all(const Layout& a, const Layout& b) {
  const Mesh& mesh = a.mesh();
  std::vector<MeshDimSet> cutting(a.ndim());
  for (int t = 0; t < a.ndim(); ++t) {
    for (const Layout* layout : {&a, &b}) {
      for (const Cut& c : layout->cuts(t)) cutting[t].insert(c.mesh_dim);
    }
    // Where both begin with the same cuts into equal parts, all parts share alike.
    int64_t n = a.shape()[t];
    for (size_t i = 0; i < std::min(a.cuts(t).size(), b.cuts(t).size()) && a.cuts(t)[i] == b.cuts(t)[i]; ++i) {
      const int64_t k = mesh.dim_size(a.cuts(t)[i].mesh_dim);
      if (a.cuts(t)[i].split_factor != 1 || n % k != 0) break;
      n /= k;
      cutting[t].erase(a.cuts(t)[i].mesh_dim);
    }
  }
  int64_t total = 1;
  MeshDimSet seen;
  std::vector<bool> done(a.ndim(), false);
  for (int first = 0; first < a.ndim(); ++first) {
    if (done[first]) continue;
    std::vector<int> coupled{first};
    MeshDimSet dims = cutting[first];
    done[first] = true;
    for (bool grew = true; grew;) {
      grew = false;
      for (int t = 0; t < a.ndim(); ++t) {
        if (done[t] || (cutting[t] & dims).empty()) continue;
        coupled.push_back(t);
        dims = dims | cutting[t];
        done[t] = grew = true;
      }
    }
    if (mesh.group_size(dims) > kMaxCombinations) return std::nullopt;
    int64_t sum = 0;
    for (const int64_t position : mesh.group(0, dims)) {
      int64_t shared = 1;
      for (const int t : coupled) {
        const int64_t n = a.shape()[t];
        shared *= intersection_length(part_at(mesh, n, a.cuts(t), position), part_at(mesh, n, b.cuts(t), position));
      }
      sum += shared;
    }
    total *= sum;
    seen = seen | dims;
  }
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (!seen.contains(d)) total *= mesh.dim_size(d);
  }
  return total;
}

int64_t held_by_all(const Layout& layout) {
  return layout.num_elements() * (layout.mesh().size() / layout.mesh().group_size(layout.cut_dims()));
}

std::optional<int64_t> received_by_all(const Step& step) {
  const int64_t item = step.before.dtype().size_bytes();
  const int64_t k = step.before.mesh().group_size(step.mesh_dims);
  if (step.op == StepOp::kReduceScatter) return (k - 1) * held_by_all(step.after) * item;
  if (step.op == StepOp::kAllReduce) return std::nullopt;  // chunks are rounded rank by rank
  const std::optional<int64_t> kept = shared_by_all(step.before, step.after);
  if (!kept) return std::nullopt;
  return (held_by_all(step.after) - *kept) * item;
}

void add_rank(TrafficTotals& totals, const Traffic& traffic) {
  totals.received_bytes_max = std::max(totals.received_bytes_max, traffic.received_bytes);
  totals.received_bytes_sum += traffic.received_bytes;
  totals.sent_bytes_max = std::max(totals.sent_bytes_max, traffic.sent_bytes);
  totals.messages_max = std::max(totals.messages_max, traffic.messages);
}

TrafficTotals totals_of_seen(const Step& step, Backend backend) {
  TrafficTotals result;
  for (const int64_t p : seen_positions(step.before.mesh())) add_rank(result, traffic_at(step, backend, p));
  return result;
}

}  // namespace

TrafficTotals totals(const Step& step, Backend backend) {
  return totals(Plan{step.before, step.after, backend, Objective::kTime, {}, false, {step}});
}

TrafficTotals totals(const Plan& plan) {
  const Mesh& mesh = plan.src.mesh();
  TrafficTotals result;
  for (const int64_t p : seen_positions(mesh)) {
    Traffic all;
    for (const Step& step : plan.steps) {
      const Traffic traffic = traffic_at(step, plan.backend, p);
      all.received_bytes += traffic.received_bytes;
      all.sent_bytes += traffic.sent_bytes;
      all.messages += traffic.messages;
    }
    add_rank(result, all);
  }
  if (mesh.size() <= kMaxRanksWalked) return result;
  result.received_bytes_sum = 0;
  for (const Step& step : plan.steps) {
    if (is_local(step.op)) continue;
    const std::optional<int64_t> sum = received_by_all(step);
    result.sum_is_exact = result.sum_is_exact && sum;
    const int64_t at_most = totals_of_seen(step, plan.backend).received_bytes_max * mesh.size();
    result.received_bytes_sum += sum ? *sum : at_most;
  }
  return result;
}

std::vector<int64_t> seen_positions(const Mesh& mesh) {
  std::vector<int64_t> positions;
  if (mesh.size() <= kMaxRanksWalked) {
    for (int64_t p = 0; p < mesh.size(); ++p) positions.push_back(p);
    return positions;
  }
  positions = {0};
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (mesh.dim_size(d) == 1) continue;
    const size_t count = positions.size();
    if (count > kMaxRanksWalked / 2) break;
    for (size_t i = 0; i < count; ++i) positions.push_back(positions[i] + (mesh.dim_size(d) - 1) * mesh.stride(d));
  }
  return positions;
}

Bound lower_bound(const Layout& src, const Layout& dst) {
  const Mesh& mesh = src.mesh();
  const int64_t item = src.dtype().size_bytes();
  const MeshDimSet reduced = src.partial_dims() - dst.partial_dims();
  Bound bound;
  if (reduced.empty()) {
    const MeshDimSet zero_filled = src.cut_dims() & dst.partial_dims();
    if (!zero_filled.empty()) return bound;  // a rank may hold any share of the value, so nothing must travel
    for (const int64_t p : seen_positions(mesh)) {
      const Region needed = dst.region(p);
      const int64_t missing = num_elements(needed) - shared_elements(src.region(p), needed);
      bound.bytes_max = std::max(bound.bytes_max, missing * item);
      bound.bytes_sum += missing * item;
    }
    if (mesh.size() > kMaxRanksWalked) {
      const std::optional<int64_t> kept = shared_by_all(src, dst);
      bound.bytes_sum = kept ? (held_by_all(dst) - *kept) * item : bound.bytes_max;
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
