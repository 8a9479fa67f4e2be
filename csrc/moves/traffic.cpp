#include "moves/traffic.h"

#include <algorithm>
#include <optional>

#include "moves/digits.h"
#include "support/error.h"

namespace shardwright {

Traffic traffic_at(const Step& step, Backend backend, int64_t position) {
  return StepTraffic(step, backend).at(position);
}

StepTraffic::StepTraffic(const Step& step, Backend backend)
    : step_(step), exchange_(step), is_native_(reduces_natively(step, backend)) {}

Traffic StepTraffic::at(int64_t position) const {
  const Mesh& mesh = step_.before.mesh();
  const int64_t item = step_.before.dtype().size_bytes();
  switch (step_.op) {
    case StepOp::kSlice:
    case StepOp::kPartition:
    case StepOp::kZeroFill:
      return {};
    case StepOp::kAllGather:
    case StepOp::kAllToAll:
    case StepOp::kPermute:
    case StepOp::kExchange:
      return exchange_.at(position);
    case StepOp::kReduceScatter: {
      const int64_t kept = num_elements(step_.after.region(position));
      Traffic traffic = reduce_scatter_traffic(num_elements(step_.before.region(position)), kept,
                                               mesh.group_size(step_.mesh_dims), item);
      traffic.messages *= std::min(step_.rounds, std::max<int64_t>(kept, 1));
      return traffic;
    }
    case StepOp::kAllReduce: {
      const int64_t held = num_elements(step_.before.region(position));
      const int64_t k = mesh.group_size(step_.mesh_dims);
      if (is_native_) return all_reduce_traffic(held, k, 0, item, true);
      const std::vector<int64_t> group = mesh.group(position, step_.mesh_dims);
      const int64_t index = std::find(group.begin(), group.end(), position) - group.begin();
      Traffic traffic;
      for (int64_t round = 0; round < step_.rounds; ++round) {
        const Interval range = in_round({0, held}, round, step_.rounds);
        const Traffic one = all_reduce_traffic(range.end - range.begin, k, index, item, false);
        traffic.received_bytes += one.received_bytes;
        traffic.sent_bytes += one.sent_bytes;
        traffic.messages += one.messages;
      }
      return traffic;
    }
  }
  throw InvariantError("unknown step op");
}

MeshDimSet StepTraffic::varying_dims() const {
  switch (step_.op) {
    case StepOp::kSlice:
    case StepOp::kPartition:
    case StepOp::kZeroFill:
      return {};
    case StepOp::kReduceScatter:
    case StepOp::kAllReduce:
      if (!step_.before.has_equal_parts() || !step_.after.has_equal_parts()) return MeshDimSet::from_bits(~0u);
      return step_.op == StepOp::kAllReduce && !is_native_ ? step_.mesh_dims : MeshDimSet();
    default:
      return exchange_.varying_dims();
  }
}

namespace {

// The positions to look at for figures that depend on the coordinates on `varying` alone, each of which stands for
// `weight` ranks. If these are too many, the corners of the mesh, which stand for nobody else: weight 0.
struct Sample {
  std::vector<int64_t> positions;
  int64_t weight = 0;
};

Sample sample(const Mesh& mesh, MeshDimSet varying) {
  const int64_t count = mesh.group_size(varying);
  if (count > kMaxRanksWalked) return {corner_positions(mesh), 0};
  return {mesh.group(0, varying), mesh.size() / count};
}

int64_t held_by_all(const Layout& layout) {
  return layout.num_elements() * (layout.mesh().size() / layout.mesh().group_size(layout.cut_dims()));
}

std::optional<int64_t> received_by_all(const Step& step, Backend backend) {
  const int64_t item = step.before.dtype().size_bytes();
  const int64_t k = step.before.mesh().group_size(step.mesh_dims);
  if (step.op == StepOp::kReduceScatter) return (k - 1) * held_by_all(step.after) * item;
  if (step.op == StepOp::kAllReduce) {
    if (!reduces_natively(step, backend)) return 2 * (k - 1) * (held_by_all(step.before) / k) * item;
    if (!step.before.has_equal_parts()) return std::nullopt;  // rounded rank by rank
    return all_reduce_traffic(num_elements(step.before.region(0)), k, 0, item, true).received_bytes *
           step.before.mesh().size();
  }
  const std::optional<int64_t> kept = SharedElements(step.before, step.after).sum();
  if (!kept) return std::nullopt;
  return (held_by_all(step.after) - *kept) * item;
}

void add_rank(TrafficTotals& totals, const Traffic& traffic) {
  totals.received_bytes_max = std::max(totals.received_bytes_max, traffic.received_bytes);
  totals.received_bytes_sum += traffic.received_bytes;
  totals.sent_bytes_max = std::max(totals.sent_bytes_max, traffic.sent_bytes);
  totals.messages_max = std::max(totals.messages_max, traffic.messages);
}

}  // namespace

TrafficTotals totals(const Step& step, Backend backend) {
  return totals(Plan{step.before, step.after, backend, Objective::kTime, {}, false, {step}});
}

TrafficTotals totals(const Plan& plan) {
  const Mesh& mesh = plan.src.mesh();
  std::vector<StepTraffic> steps;
  steps.reserve(plan.steps.size());
  MeshDimSet varying;
  for (const Step& step : plan.steps) {
    if (is_local(step.op)) continue;
    steps.emplace_back(step, plan.backend);
    varying = varying | steps.back().varying_dims();
  }
  const Sample seen = sample(mesh, varying);
  TrafficTotals result;
  for (const StepTraffic& one : steps) result.steps += one.step().rounds;
  std::vector<int64_t> received_max(steps.size(), 0);
  for (const int64_t p : seen.positions) {
    Traffic all;
    for (size_t i = 0; i < steps.size(); ++i) {
      const Traffic traffic = steps[i].at(p);
      received_max[i] = std::max(received_max[i], traffic.received_bytes);
      all.received_bytes += traffic.received_bytes;
      all.sent_bytes += traffic.sent_bytes;
      all.messages += traffic.messages;
    }
    add_rank(result, all);
  }
  result.received_bytes_sum *= seen.weight;
  if (seen.weight > 0) return result;
  for (size_t i = 0; i < steps.size(); ++i) {
    const std::optional<int64_t> sum = received_by_all(steps[i].step(), plan.backend);
    result.sum_is_exact = result.sum_is_exact && sum;
    result.received_bytes_sum += sum ? *sum : received_max[i] * mesh.size();
  }
  return result;
}

std::vector<int64_t> seen_positions(const Mesh& mesh) {
  std::vector<int64_t> positions;
  if (mesh.size() <= kMaxRanksWalked) {
    for (int64_t p = 0; p < mesh.size(); ++p) positions.push_back(p);
    return positions;
  }
  return corner_positions(mesh);
}

std::vector<int64_t> corner_positions(const Mesh& mesh, MeshDimSet mesh_dims, size_t at_most) {
  std::vector<int64_t> positions{0};
  for (const int d : mesh_dims.to_vector()) {
    const size_t count = positions.size();
    if (d >= mesh.ndim() || mesh.dim_size(d) == 1 || 2 * count > at_most) continue;
    for (size_t i = 0; i < count; ++i) positions.push_back(positions[i] + (mesh.dim_size(d) - 1) * mesh.stride(d));
  }
  return positions;
}

std::vector<int64_t> corner_positions(const Mesh& mesh) {
  return corner_positions(mesh, MeshDimSet::from_bits(~0u), kMaxRanksWalked);
}

Bound lower_bound(const Layout& src, const Layout& dst) {
  const Mesh& mesh = src.mesh();
  const int64_t item = src.dtype().size_bytes();
  const MeshDimSet reduced = src.partial_dims() - dst.partial_dims();
  Bound bound;
  if (reduced.empty()) {
    const MeshDimSet zero_filled = src.cut_dims() & dst.partial_dims();
    if (!zero_filled.empty()) return bound;  // a rank may hold any share of the value, so nothing must travel
    const SharedElements shared(src, dst);
    const bool has_equal_parts = !shared.matchings().empty();
    const int64_t first = num_elements(dst.region(0));
    const Sample seen = sample(mesh, shared.varying_dims());
    for (const int64_t p : seen.positions) {
      const int64_t missing = (has_equal_parts ? first : num_elements(dst.region(p))) - shared.at(p);
      bound.bytes_max = std::max(bound.bytes_max, missing * item);
      bound.bytes_sum += missing * item * seen.weight;
    }
    if (seen.weight == 0) {
      const std::optional<int64_t> kept = shared.sum();
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
