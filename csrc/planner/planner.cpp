// Choosing the moves, first form: reduce once, then one data move, then what is local.
//
//   1. Refuse what PyTorch does not define; equal layouts need no move.
//   2. If reductions are due, try every way to spread the result over the reducing ranks (or to keep it whole), and
//      take the one that is cheapest together with the data move that follows.
//   3. One move over exactly the mesh dims whose cuts change: a slice if all is there already, else a collective.
//   4. Zero-fill and partition, which are local.
#include <algorithm>
#include <array>
#include <optional>

#include "layout/error.h"
#include "planner/cost.h"
#include "planner/exchange.h"
#include "planner/plan.h"

namespace shardwright {
namespace {

using Cuts = std::vector<std::vector<Cut>>;

// What happens to each mesh dim that is partial on either side.
struct PartialWork {
  MeshDimSet reduced;      // P -> R or S
  MeshDimSet partitioned;  // R -> P
  MeshDimSet zero_filled;  // S -> P
};

void check_same_tensor(const Layout& src, const Layout& dst) {
  check_user(src.mesh() == dst.mesh(), "mesh: source and destination lie on different meshes (", src.mesh().to_string(),
             " and ", dst.mesh().to_string(), "); allowed is one mesh");
  check_user(src.shape() == dst.shape(), "shape: source (", join(src.shape()), ") and destination (", join(dst.shape()),
             ") differ");
  check_user(src.dtype() == dst.dtype(), "dtype: source ", src.dtype().name(), " and destination ", dst.dtype().name(),
             " differ; cast before or after");
}

PartialWork partial_work(const Layout& src, const Layout& dst) {
  PartialWork work;
  work.reduced = src.partial_dims() - dst.partial_dims();
  for (const int d : dst.partial_dims().to_vector()) {
    const Placement& from = src.placements()[d];
    const Placement& to = dst.placements()[d];
    const std::string where = concat(" on mesh dim '", src.mesh().dim_names()[d], "'");
    if (src.partial_dims().contains(d)) {
      check_user(from == to, "placements: ", from.to_string(), " cannot become ", to.to_string(), where,
                 "; reduce it to R first");
    } else if (src.cut_dims().contains(d)) {
      check_user(to.op == ReduceOp::kSum, "placements: ", from.to_string(), " cannot become ", to.to_string(), where,
                 "; allowed is P(sum), whose other shares are zeros");
      work.zero_filled.insert(d);
    } else {
      const bool divisible = to.op == ReduceOp::kSum || to.op == ReduceOp::kAvg || to.op == ReduceOp::kMin ||
                             to.op == ReduceOp::kMax || to.op == ReduceOp::kNorm;
      check_user(divisible, "placements: R cannot become ", to.to_string(), where,
                 "; allowed are P(sum), P(avg), P(min), P(max), P(norm p)");
      work.partitioned.insert(d);
    }
  }
  return work;
}

size_t common_prefix(const std::vector<Cut>& a, const std::vector<Cut>& b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

// The mesh dims whose cuts change. Ranks of one group then share every cut before the first that differs, so the group
// as a whole holds, for each tensor dim, exactly the range it needs: whatever the sizes.
MeshDimSet changed_dims(const Layout& before, const Layout& after) {
  MeshDimSet dims;
  for (int t = 0; t < before.ndim(); ++t) {
    const size_t shared = common_prefix(before.cuts(t), after.cuts(t));
    for (size_t i = shared; i < before.cuts(t).size(); ++i) dims.insert(before.cuts(t)[i].mesh_dim);
    for (size_t i = shared; i < after.cuts(t).size(); ++i) dims.insert(after.cuts(t)[i].mesh_dim);
  }
  return dims;
}

// All ranks already hold what they need: only cuts behind the present ones are added.
bool only_adds_cuts(const Layout& before, const Layout& after) {
  for (int t = 0; t < before.ndim(); ++t) {
    if (common_prefix(before.cuts(t), after.cuts(t)) != before.cuts(t).size()) return false;
  }
  return true;
}

// Names the collective by what rank 0's group does; the compiler decides by what the own group does, so a wrong
// name could cost clarity, never data.
StepOp data_move_op(const Step& step) {
  const MeshDimSet dims = step.mesh_dims;
  if ((dims & step.before.cut_dims()) == dims && (dims & step.after.cut_dims()).empty()) return StepOp::kAllGather;
  const std::vector<int64_t> sources = sources_of(step, 0);
  const auto k = static_cast<int64_t>(step.before.mesh().group(0, dims).size());
  std::vector<int64_t> parts;
  for (const int64_t source : sources) parts.push_back(transfer_elements(step, source, 0));
  const bool all_equal = std::all_of(parts.begin(), parts.end(), [&](int64_t n) { return n == parts[0] && n > 0; });
  if (all_equal && static_cast<int64_t>(sources.size()) == k) return StepOp::kAllToAll;
  for (int64_t position : step.before.mesh().group(0, dims)) {
    const Traffic traffic = traffic_at({StepOp::kExchange, dims, step.before, step.after}, Backend::kNccl, position);
    const int64_t whole = num_elements(step.after.region(position)) * step.after.dtype().size_bytes();
    const bool one_peer = traffic.messages <= 1 && (traffic.received_bytes == whole || traffic.received_bytes == 0) &&
                          traffic.sent_bytes == traffic.received_bytes;
    if (!one_peer) return StepOp::kExchange;
  }
  return StepOp::kPermute;
}

void add_data_move(std::vector<Step>& steps, const Layout& before, const Layout& after) {
  const MeshDimSet dims = changed_dims(before, after);
  if (dims.empty()) return;
  Step step{StepOp::kSlice, dims, before, after};
  if (before.num_elements() > 0 && !only_adds_cuts(before, after)) step.op = data_move_op(step);
  steps.push_back(std::move(step));
}

Layout without_partials(const Layout& layout, MeshDimSet dims, Cuts cuts) {
  std::vector<Placement> partials(layout.mesh().ndim(), Placement::replicate());
  for (const int d : (layout.partial_dims() - dims).to_vector()) partials[d] = layout.placements()[d];
  return layout.with(std::move(cuts), partials);
}

// Appends the dims of `spread` that `goal` cuts, in goal's order and on goal's tensor dims, and the others to
// `rest_dim`.
Cuts spread_cuts(const Layout& base, const Layout& goal, MeshDimSet spread, int rest_dim, bool follow_goal) {
  Cuts cuts = base.cuts();
  MeshDimSet rest = spread;
  for (int t = 0; t < base.ndim() && follow_goal; ++t) {
    for (const Cut& c : goal.cuts(t)) {
      if (!spread.contains(c.mesh_dim)) continue;
      cuts[t].push_back(c);
      rest.erase(c.mesh_dim);
    }
  }
  for (const int d : rest.to_vector()) cuts[rest_dim].push_back({d, 1});
  return cuts;
}

// (P,P,P) -> (R,S(0),R): reduce-scatter over all three, S(0) cut first, then gather the other two.
std::vector<Step> reduce_and_move(const Layout& src, const Layout& goal, MeshDimSet reduced, Backend backend) {
  std::vector<Layout> middles{without_partials(src, reduced, src.cuts())};
  for (int t = 0; t < src.ndim(); ++t) {
    for (const bool follow_goal : {true, false}) {
      middles.push_back(without_partials(src, reduced, spread_cuts(src, goal, reduced, t, follow_goal)));
    }
  }
  std::vector<Step> best;
  std::optional<int64_t> best_cost;
  for (const Layout& middle : middles) {
    const bool whole = (middle.cut_dims() & reduced).empty();
    std::vector<Step> steps{{whole ? StepOp::kAllReduce : StepOp::kReduceScatter, reduced, src, middle}};
    add_data_move(steps, middle, goal);
    const int64_t cost = predicted_picoseconds(steps, backend);
    if (!best_cost || cost < *best_cost) {
      best = std::move(steps);
      best_cost = cost;
    }
  }
  return best;
}

}  // namespace

Plan make_plan(const Layout& src, const Layout& dst, Backend backend) {
  check_same_tensor(src, dst);
  const PartialWork work = partial_work(src, dst);
  Plan plan{src, dst, backend, {}};
  if (src == dst) return plan;

  // The goal of the data move: dst, before anything becomes partial. A dim that will be zero-filled stays cut,
  // innermost, so that the fill is local.
  Cuts goal_cuts = dst.cuts();
  for (int t = 0; t < src.ndim(); ++t) {
    for (const Cut& c : src.cuts(t)) {
      if (work.zero_filled.contains(c.mesh_dim)) goal_cuts[t].push_back({c.mesh_dim, 1});
    }
  }
  const Layout goal = without_partials(dst, work.partitioned | work.zero_filled, std::move(goal_cuts));

  if (work.reduced.empty()) {
    add_data_move(plan.steps, src, goal);
  } else {
    plan.steps = reduce_and_move(src, goal, work.reduced, backend);
  }
  if (!work.zero_filled.empty()) {
    const Layout filled = without_partials(dst, work.partitioned, dst.cuts());
    plan.steps.push_back({StepOp::kZeroFill, work.zero_filled, goal, filled});
  }
  // For P(avg), P(min) and P(max) the same values stand for both.
  MeshDimSet scaled;
  for (const int d : work.partitioned.to_vector()) {
    const ReduceOp op = dst.placements()[d].op;
    if (op == ReduceOp::kSum || op == ReduceOp::kNorm) scaled.insert(d);
  }
  if (!scaled.empty()) {
    const Layout before = plan.steps.empty() ? goal : plan.steps.back().after;
    plan.steps.push_back({StepOp::kPartition, scaled, before, dst});
  }
  return plan;
}

}  // namespace shardwright
