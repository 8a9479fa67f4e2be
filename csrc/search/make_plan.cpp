// Makes a plan in three steps:
//
//   1. Reject redistributions that PyTorch does not define. Equal layouts need no move.
//   2. Find the cheapest moves to the goal, which is the destination before any mesh dim becomes partial (search.cpp).
//   3. Append zero-fills and partitions, which are local.
//
// Between two meshes, step 2 is two_meshes.cpp, and all pending reductions of the source are done. For pieces and
// flattened dims it is rearrangements.cpp.
#include "search/make_plan.h"

#include <algorithm>

#include "moves/move.h"
#include "moves/spans.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "search/crossing_cost.h"
#include "search/rearrangements.h"
#include "search/search.h"
#include "search/two_meshes.h"
#include "support/error.h"

namespace shardwright {
namespace {

using Cuts = std::vector<std::vector<Cut>>;

// The mesh dims that are partial in the source or the destination, by their change.
struct PartialWork {
  MeshDimSet reduced;      // P -> R or S
  MeshDimSet partitioned;  // R -> P
  MeshDimSet zero_filled;  // S -> P
};

// Throws UserError if the layouts differ in shape or dtype.
void check_same_tensor(const Layout& src, const Layout& dst, const char* argument) {
  if (src.tensor_shape() != dst.tensor_shape()) {
    throw UserError(concat(argument, " must have the shape of the source, (", join(src.tensor_shape()), "), got (",
                           join(dst.tensor_shape()), ")"));
  }
  if (!(src.dtype() == dst.dtype())) {
    throw UserError(concat(argument, " must have the dtype of the source, ", src.dtype().name(), ", got ",
                           dst.dtype().name(), "; cast before or after"));
  }
}

// Returns true if a value can be divided into contributions that this reduction turns back into the value.
bool is_divisible(ReduceOp op) {
  return op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kMin || op == ReduceOp::kMax ||
         op == ReduceOp::kNorm;
}

// Returns the partial work on one mesh. Throws UserError if PyTorch does not define the redistribution.
PartialWork partial_work(const Layout& src, const Layout& dst) {
  PartialWork work;
  work.reduced = src.partial_dims() - dst.partial_dims();
  for (const int d : dst.partial_dims().to_vector()) {
    const Placement& from = src.placements()[d];
    const Placement& to = dst.placements()[d];
    const std::string& mesh_dim = src.mesh().dim_names()[d];
    if (src.partial_dims().contains(d)) {
      check_user(from == to, "placements: destination of ", from, " -> P on mesh dim '", mesh_dim, "' must be ", from,
                 ", got ", to, "; reduce to R first");
    } else if (src.cut_dims().contains(d)) {
      check_user(to.op == ReduceOp::kSum, "placements: destination of ", from, " -> P on mesh dim '", mesh_dim,
                 "' must be P(sum), got ", to, "; ranks contribute zeros outside of their shards");
      work.zero_filled.insert(d);
    } else {
      check_user(is_divisible(to.op), "placements: destination of R -> P on mesh dim '", mesh_dim,
                 "' must be one of P(sum), P(avg), P(min), P(max), P(norm p), got ", to);
      work.partitioned.insert(d);
    }
  }
  return work;
}

// Returns the layout with these cuts and without the partials on `dims`.
Layout without_partials(const Layout& layout, MeshDimSet dims, Cuts cuts) {
  std::vector<Placement> partials(layout.mesh().ndim(), Placement::replicate());
  for (const int d : (layout.partial_dims() - dims).to_vector()) partials[d] = layout.placements()[d];
  return layout.with(std::move(cuts), partials);
}

// Returns the partial work between two meshes, where the mesh dims of the two sides are independent. Ranks of a
// destination that is P(sum) receive parts and fill in zeros elsewhere.
PartialWork partial_work_between(const Layout& src, const Layout& dst) {
  PartialWork work;
  work.reduced = src.partial_dims();
  for (const int d : dst.partial_dims().to_vector()) {
    const Placement& to = dst.placements()[d];
    check_user(is_divisible(to.op), "placements: partial destination on mesh dim '", dst.mesh().dim_names()[d],
               "' of another mesh must be one of P(sum), P(avg), P(min), P(max), P(norm p), got ", to);
    (to.op == ReduceOp::kSum && dst.ndim() > 0 ? work.zero_filled : work.partitioned).insert(d);
  }
  return work;
}

// Returns the partial work on one mesh or between two.
PartialWork any_partial_work(const Layout& src, const Layout& dst) {
  return src.mesh() == dst.mesh() ? partial_work(src, dst) : partial_work_between(src, dst);
}

// Returns the goal of the search: `dst` before mesh dims become partial. A mesh dim that will be partitioned replicates
// in the goal. A mesh dim that will be zero-filled cuts in the goal, so that the fill is local: the tensor dim that the
// mesh dim cuts in `src` or, between two meshes and for rearrangements, the longest tensor dim. This cut follows the
// cuts of `dst`. Its rule is chunks; but a source's rule that is neither chunks nor strided is kept if the cuts before
// it are those of the source.
Layout goal_of(const Layout& src, const Layout& dst, const PartialWork& work) {
  Cuts goal_cuts = dst.cuts();
  if (!(src.mesh() == dst.mesh()) || needs_rearrangement(src, dst)) {
    const auto longest = std::max_element(dst.shape().begin(), dst.shape().end()) - dst.shape().begin();
    for (const int d : work.zero_filled.to_vector()) goal_cuts[longest].push_back({d, 1});
    return without_partials(dst, work.partitioned | work.zero_filled, std::move(goal_cuts));
  }
  for (int t = 0; t < src.ndim(); ++t) {
    for (const Cut& c : src.cuts(t)) {
      if (!work.zero_filled.contains(c.mesh_dim)) continue;
      const std::vector<Cut>& earlier = goal_cuts[t];
      const bool follows_same_cuts = earlier.size() < src.cuts(t).size() && src.cuts(t)[earlier.size()] == c &&
                                     std::equal(earlier.begin(), earlier.end(), src.cuts(t).begin());
      const bool keeps_rule = follows_same_cuts && !c.rule.is_strided_or_chunks();
      goal_cuts[t].push_back({c.mesh_dim, keeps_rule ? c.rule : CutRule()});
    }
  }
  return without_partials(dst, work.partitioned | work.zero_filled, std::move(goal_cuts));
}

// Returns true if some cut is neither chunks nor strided.
bool has_cuts_by_rule(const Layout& layout) {
  return std::any_of(layout.placements().begin(), layout.placements().end(),
                     [](const Placement& placement) { return placement.kind == PlacementKind::kShardByRule; });
}

// Returns true if layouts differ only in pending reductions, so that one reduction leads from `from` to `to`.
bool only_reduces(const Layout& from, const Layout& to) {
  return from.mesh() == to.mesh() && from.flattened() == to.flattened() && from.cuts() == to.cuts() &&
         !(from.partial_dims() - to.partial_dims()).empty();
}

// Returns a plan without steps. Throws UserError if the arguments of a plan are invalid.
Plan empty_plan(const Layout& src, const Layout& dst, const PlanOptions& options) {
  check_same_tensor(src, dst, "destination");
  check_user(src.mesh() == dst.mesh() || options.groups.empty(), "groups must not be given between two meshes, got ",
             options.groups.size(), " sets of mesh dims for ", src, " -> ", dst, "; leave groups out");
  Topology topology = options.topology ? *options.topology : Topology::named(options.lowering.default_topology);
  topology.check();
  return {src, dst, options.lowering, options.objective, std::move(topology), !options.groups.empty(), {}};
}

}  // namespace

bool is_ordered(const std::string& reduce, const Layout& src) {
  check_argument(reduce == "fast" || reduce == "float32" || reduce == "ordered", "reduce",
                 "one of fast, float32, ordered", "'", reduce, "'");
  if (reduce != "float32") return reduce == "ordered";
  if (src.dtype().kind() != DTypeKind::kFloat || src.dtype().size_bytes() != 2) return false;
  for (const int d : src.partial_dims().to_vector()) {
    const ReduceOp op = src.placements()[d].op;
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kNorm) return true;
  }
  return false;
}

Plan plan_through(const std::vector<Layout>& layouts, const PlanOptions& options) {
  check_argument(layouts.size() >= 2, "layouts", "a list of at least two layouts", layouts.size());
  Plan plan = empty_plan(layouts.front(), layouts.back(), options);
  int64_t crossings = 0;
  for (size_t i = 0; i + 1 < layouts.size(); ++i) crossings += layouts[i].mesh() == layouts[i + 1].mesh() ? 0 : 1;
  check_user(crossings == (crosses(plan) ? 1 : 0), "through: number of mesh changes must be ", crosses(plan) ? 1 : 0,
             ", got ", crossings, "; list layouts on the source's mesh first, then those on the destination's");
  for (size_t i = 0; i + 1 < layouts.size(); ++i) {
    check_same_tensor(layouts.front(), layouts[i + 1], "through");
    any_partial_work(layouts[i], layouts[i + 1]);  // throws for P(sum) to P(max), where no data would move
    if (needs_rearrangement(layouts[i], layouts[i + 1]) && !only_reduces(layouts[i], layouts[i + 1])) {
      const Plan part = make_plan(layouts[i], layouts[i + 1], options);
      plan.steps.insert(plan.steps.end(), part.steps.begin(), part.steps.end());
      continue;
    }
    if (!(layouts[i].mesh() == layouts[i + 1].mesh())) {
      check_user(layouts[i].partial_dims().empty() && layouts[i + 1].partial_dims().empty(),
                 "through: neighbors on different meshes must be layouts without partials, got ", layouts[i], " -> ",
                 layouts[i + 1], "; reduce them before the mesh changes");
      plan.steps.push_back({StepOp::kCross, {}, layouts[i], layouts[i + 1], ReplicaPolicy::kEvenBytes});
      continue;
    }
    if (layouts[i].partial_dims() == layouts[i + 1].partial_dims() && same_parts(layouts[i], layouts[i + 1])) continue;
    std::optional<Step> step = move_between(layouts[i], layouts[i + 1], options.groups);
    if (!step.has_value()) {
      throw UserError(concat("through: neighbors must be at most one move apart, got ", layouts[i].placements_string(),
                             " -> ", layouts[i + 1].placements_string(), " on ", layouts[i].mesh(),
                             "; add a layout between them"));
    }
    step->ordered = options.ordered && (step->op == StepOp::kAllReduce || step->op == StepOp::kReduceScatter);
    plan.steps.push_back(named_by_collective(std::move(*step)));
  }
  return plan;
}

Plan make_plan(const Layout& src, const Layout& dst, const PlanOptions& options) {
  Plan plan = empty_plan(src, dst, options);
  const PartialWork work = any_partial_work(src, dst);
  if (src == dst) return plan;
  // Layouts of other rules are compared here; the search itself finds equal parts of chunks and strided cuts.
  const bool may_have_same_parts = (has_cuts_by_rule(src) || has_cuts_by_rule(dst)) && src.mesh() == dst.mesh() &&
                                   src.flattened() == dst.flattened() && src.partial_dims() == dst.partial_dims();
  if (may_have_same_parts && same_parts(src, dst)) return plan;

  const Layout goal = goal_of(src, dst, work);
  if (needs_rearrangement(src, goal)) {
    plan.steps = cheapest_rearrangement(src, goal, options, plan.topology);
  } else if (crosses(plan)) {
    plan.steps = cheapest_crossing(src, goal, options, plan.topology, dst.partial_dims().empty());
  } else {
    plan.steps = cheapest_moves(src, goal, options, plan.topology);
  }
  if (!work.zero_filled.empty()) {
    const Layout filled = without_partials(dst, work.partitioned, dst.cuts());
    plan.steps.push_back({StepOp::kZeroFill, work.zero_filled, goal, filled});
  }
  // R becomes P(avg), P(min) or P(max) without any change of values.
  MeshDimSet scaled;
  for (const int d : work.partitioned.to_vector()) {
    const ReduceOp op = dst.placements()[d].op;
    if (op == ReduceOp::kSum || op == ReduceOp::kNorm) scaled.insert(d);
  }
  if (!scaled.empty()) {
    const Layout before = plan.steps.empty() ? goal : plan.steps.back().after;
    plan.steps.push_back({StepOp::kPartition, scaled, before, dst});
  }
  if (crosses(plan) && options.objective == Objective::kTime && options.segments) plan.segments = best_segments(plan);
  return plan;
}

int64_t least_picoseconds(const Plan& plan) {
  if (plan.src == plan.dst) return 0;
  if (crosses(plan) || needs_rearrangement(plan.src, plan.dst)) {
    return least_picoseconds_between(plan.src, plan.dst, plan.topology);
  }
  const PartialWork work = partial_work(plan.src, plan.dst);
  if (!(work.partitioned | work.zero_filled).empty()) {
    // The goal fixes the shares of a value that ranks hold before it becomes partial; other plans may choose others.
    const Bound received = lower_bound(plan.src, plan.dst);
    ExchangeBound bound;
    bound.received_bytes_max = received.bytes_max;
    bound.received_bytes_sum = received.bytes_sum;
    return least_picoseconds_for(bound, plan.dst, plan.topology);
  }
  const Layout goal = goal_of(plan.src, plan.dst, work);
  return least_first_cost(plan.src, goal, {plan.lowering, Objective::kTime, false, plan.topology}, plan.topology);
}

}  // namespace shardwright
