#include "planning/validate.h"

#include <algorithm>
#include <optional>

#include "exchange/indexed_exchange.h"
#include "exchange/mesh_exchange.h"
#include "layout/positions.h"
#include "moves/move.h"
#include "moves/move_table.h"
#include "moves/segments.h"
#include "moves/spans.h"
#include "search/split.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Returns true if every rank holds the same elements in the same order in both layouts, which are on one mesh.
bool holds_the_same_parts(const Layout& a, const Layout& b) {
  if (a.flattened() != b.flattened()) return false;
  if (same_parts(a, b)) return true;
  MoveTable table(a, Lowering::kNccl);
  return table.state(a.cuts(), {}) == table.state(b.cuts(), {});
}

// Returns true if mesh dims that are pending in both layouts have the same reduction.
bool same_pending_reductions(const Layout& a, const Layout& b) {
  const std::vector<int> both = (a.partial_dims() & b.partial_dims()).to_vector();
  return std::all_of(both.begin(), both.end(), [&](int d) { return a.placements()[d] == b.placements()[d]; });
}

// Returns the mesh dims that become partial and whose contributions differ from the replicated value: all except
// P(avg), P(min) and P(max).
MeshDimSet dims_to_scale(const Layout& before, const Layout& after) {
  MeshDimSet dims;
  for (const int d : (after.partial_dims() - before.partial_dims()).to_vector()) {
    const ReduceOp op = after.placements()[d].op;
    if (op != ReduceOp::kAvg && op != ReduceOp::kMin && op != ReduceOp::kMax) dims.insert(d);
  }
  return dims;
}

// Returns true if a valid partition (StepOp in moves/step.h) leads from `before` to `after`: parts stay, and the
// `scaled` mesh dims become P(sum) or P(norm) instead of R. On other mesh dims, R may become P(avg), P(min) or
// P(max), which do not change values. Without `scaled` mesh dims, ranks hold the same values in both layouts.
bool partitions(const Layout& before, const Layout& after, MeshDimSet scaled) {
  for (const int d : scaled.to_vector()) {
    const ReduceOp op = after.placements()[d].op;
    if (op != ReduceOp::kSum && op != ReduceOp::kNorm) return false;
  }
  return holds_the_same_parts(before, after) && same_pending_reductions(before, after) &&
         (before.partial_dims() - after.partial_dims()).empty() && dims_to_scale(before, after) == scaled;
}

// Returns true if a step is a valid zero_fill: its mesh dims are the innermost cuts before it and P(sum) after it.
// These cuts must be partitions, because an element on several ranks would be added several times.
bool is_valid_zero_fill(const Step& step) {
  const Layout& before = step.before;
  const Layout& after = step.after;
  if (before.flattened() != after.flattened()) return false;
  if (!((before.partial_dims() | step.mesh_dims) == after.partial_dims()) || !same_pending_reductions(before, after))
    return false;
  if (!(step.mesh_dims - before.cut_dims()).empty()) return false;
  for (const int d : step.mesh_dims.to_vector()) {
    if (after.placements()[d].op != ReduceOp::kSum) return false;
  }
  for (int t = 0; t < before.ndim(); ++t) {
    const std::vector<Cut>& kept = after.cuts(t);
    const std::vector<Cut>& cuts = before.cuts(t);
    if (kept.size() > cuts.size() || !std::equal(kept.begin(), kept.end(), cuts.begin())) return false;
    const bool fills_the_rest =
        std::all_of(cuts.begin() + static_cast<int64_t>(kept.size()), cuts.end(), [&](const Cut& c) {
          const bool is_strided = c.rule.is_strided_or_chunks() && !c.rule.is_chunks();
          return !is_strided && c.rule.is_partition() && step.mesh_dims.contains(c.mesh_dim);
        });
    if (!fills_the_rest) return false;
  }
  return true;
}

// Returns true if a step is a reduction that keeps all cuts and at most adds partitions after them.
bool reduces_parts(const Step& step) {
  if (step.op != StepOp::kAllReduce && step.op != StepOp::kReduceScatter) return false;
  if (step.before.flattened() != step.after.flattened()) return false;
  for (int t = 0; t < step.before.ndim(); ++t) {
    const std::vector<Cut>& kept = step.before.cuts(t);
    const std::vector<Cut>& cuts = step.after.cuts(t);
    if (cuts.size() < kept.size() || !std::equal(kept.begin(), kept.end(), cuts.begin())) return false;
    const bool adds_partitions = std::all_of(cuts.begin() + static_cast<int64_t>(kept.size()), cuts.end(),
                                             [](const Cut& cut) { return cut.rule.is_partition(); });
    if (!adds_partitions) return false;
  }
  return true;
}

// Returns true if a step is a slice that keeps pending reductions, and each rank already holds all elements of its part
// after the step.
bool is_valid_slice(const Step& step) {
  if (step.op != StepOp::kSlice || step.before.flattened() != step.after.flattened()) return false;
  if (!(step.before.partial_dims() == step.after.partial_dims()) || !same_pending_reductions(step.before, step.after))
    return false;
  return !IndexedExchange(step.before, step.after, ReplicaPolicy::kWholeMessages).communicates();
}

// Returns true if the op of a step is the name that named_by_collective (moves/move.h) gives to its exchange.
bool is_named_by_collective(const Step& step) {
  Step exchange = step;
  exchange.op = StepOp::kExchange;
  exchange.rounds = 1;
  return named_by_collective(std::move(exchange)).op == step.op;
}

constexpr int64_t kMaxPairs = int64_t{1} << 22;  // of ranks, whose parts hold_needed_elements compares per tensor dim

// Returns true if the ranks of each group over `mesh_dims` together hold all elements in `before` that they need in
// `after`. Both layouts must be partitions of one shape. Then each mesh dim cuts at most one tensor dim, so each tensor
// dim can be checked alone: its parts at different coordinates on the mesh dims that cut it are disjoint. Returns false
// for more than kMaxPairs pairs of ranks.
bool hold_needed_elements(const Layout& before, const Layout& after, MeshDimSet mesh_dims) {
  const Mesh& mesh = before.mesh();
  for (int t = 0; t < before.ndim(); ++t) {
    const MeshDimSet cutting = dims_of(before.cuts(t)) | dims_of(after.cuts(t));
    const MeshDimSet spanned = dims_of(before.cuts(t)) & mesh_dims;
    if (mesh.group_size(cutting) > kMaxPairs / mesh.group_size(spanned)) return false;
    const std::vector<int64_t> members = positions_along(mesh, spanned.to_vector());
    for (const int64_t first : positions_along(mesh, (cutting - spanned).to_vector())) {
      std::vector<IntervalList> held;
      for (const int64_t member : members)
        held.push_back(part_at(mesh, before.shape()[t], before.cuts(t), first + member));
      for (const int64_t member : members) {
        const IntervalList needed = part_at(mesh, after.shape()[t], after.cuts(t), first + member);
        int64_t num_held = 0;
        for (const IntervalList& list : held) num_held += length(intersect(list, needed));
        if (num_held != length(needed)) return false;
      }
    }
  }
  return true;
}

// Returns true if a step is a valid slice or exchange, judged by the parts that ranks hold instead of the placements.
// Several placements may describe the same parts; for some of these placements, is_known_move() requires more mesh dims
// than the move spans.
bool is_valid_by_parts(const Step& step) {
  const bool is_local = step.op == StepOp::kSlice;
  const bool changes_pending =
      !(step.before.partial_dims() == step.after.partial_dims()) || !same_pending_reductions(step.before, step.after);
  if (changes_pending || step.before.flattened() != step.after.flattened()) return false;
  if (!hold_needed_elements(step.before, step.after, is_local ? MeshDimSet() : step.mesh_dims)) return false;
  if (is_local) return true;
  return is_named_by_collective(step);
}

// Returns true if move_between() finds this step, or an exchange over a subset of the step's mesh dims.
bool is_known_move(const Step& step) {
  const std::optional<Step> found = move_between(step.before, step.after);
  if (!found || !same_pending_reductions(step.before, step.after)) return false;
  const bool reduces = step.op == StepOp::kAllReduce || step.op == StepOp::kReduceScatter;
  if (reduces || found->op == StepOp::kSlice)
    return step.op == found->op && (!reduces || step.mesh_dims == found->mesh_dims);
  if (found->op != StepOp::kExchange || !(found->mesh_dims - step.mesh_dims).empty()) return false;
  return is_named_by_collective(step);
}

// Returns true if a step on one mesh, other than a partition, zero_fill or rearrangement, is valid.
bool is_valid_on_mesh(const Step& step) {
  if (needs_rearrangement(step.before, step.after) && !reduces_parts(step)) return is_valid_slice(step);
  return is_known_move(step) || is_valid_by_parts(step);
}

// Returns true if the fields of a kCross step are valid. Its layouts must not need a rearrangement.
bool is_valid_crossing(const Step& step) {
  const bool has_pending = !step.before.partial_dims().empty() || !step.after.partial_dims().empty();
  return !(step.before.mesh() == step.after.mesh()) && !needs_rearrangement(step.before, step.after) && !has_pending &&
         step.mesh_dims.empty() && !step.ordered && step.policy != ReplicaPolicy::kAligned &&
         (step.policy == ReplicaPolicy::kNodeLocal) == (step.ranks_per_node > 0);
}

// Returns true if the fields of a kRearrange step are valid. On one mesh, pending reductions must stay.
bool is_valid_rearrangement(const Step& step) {
  const MeshDimSet kept = step.before.mesh() == step.after.mesh() ? step.before.partial_dims() : MeshDimSet();
  return step.before.partial_dims() == kept && step.after.partial_dims() == kept &&
         (kept.empty() || same_pending_reductions(step.before, step.after)) && step.mesh_dims.empty() &&
         !step.ordered && step.policy != ReplicaPolicy::kAligned && step.policy != ReplicaPolicy::kNodeLocal;
}

// Returns true if a single move of the step's kind leads from its layout before to its layout after.
bool is_valid_move(const Step& step, Lowering lowering) {
  if (step.op == StepOp::kRearrange) return is_valid_rearrangement(step);
  if (step.op == StepOp::kCross) return is_valid_crossing(step);
  if (!(step.before.mesh() == step.after.mesh())) return false;
  const bool reduces = step.op == StepOp::kAllReduce || step.op == StepOp::kReduceScatter;
  if (step.ordered && !reduces) return false;
  if (step.rounds > 1 && !can_run_in_rounds(step, lowering)) return false;
  if (step.policy != ReplicaPolicy::kAligned) {
    const bool can_share = step.op == StepOp::kExchange && step.policy != ReplicaPolicy::kNodeLocal &&
                           (step.mesh_dims & step.before.partial_dims()).empty() &&
                           step.before.mesh().group_size(step.mesh_dims) <= MeshExchange::kMaxSharingGroup;
    if (!can_share) return false;
  }
  if (step.op == StepOp::kPartition) return partitions(step.before, step.after, step.mesh_dims);
  return step.op == StepOp::kZeroFill ? is_valid_zero_fill(step) : is_valid_on_mesh(step);
}

// Parts of messages that are formatted only if a check fails.
struct PlacementsOf {
  const Layout& layout;
  std::string to_string() const { return layout.placements_string(); }
};

struct NameOf {
  const Step& step;
  std::string to_string() const { return step_name(step); }
};

}  // namespace

bool leads_to_another_mesh(const Step& step) {
  return is_cross_or_rearrange(step.op) && !(step.before.mesh() == step.after.mesh());
}

const Mesh& mesh_reached(const Plan& plan) {
  for (auto step = plan.steps.rbegin(); step != plan.steps.rend(); ++step) {
    if (leads_to_another_mesh(*step)) return step->after.mesh();
  }
  return plan.dst.mesh();
}

std::vector<MeshPtr> meshes_of_relays(const Plan& plan) {
  std::vector<MeshPtr> meshes;
  for (const Step& step : plan.steps) {
    if (leads_to_another_mesh(step)) meshes.push_back(step.after.mesh_ptr());
  }
  if (!meshes.empty()) meshes.pop_back();
  return meshes;
}

void check_meshes(const Plan& plan) {
  const auto crossings = std::count_if(plan.steps.begin(), plan.steps.end(), leads_to_another_mesh);
  check_user(crossings == 0 || crosses(plan), "plan must stay on the mesh of its source and destination, got ",
             crossings, " steps to another mesh");
  for (const MeshPtr& relays : meshes_of_relays(plan)) {
    for (const Rank rank : relays->ranks()) {
      check_user(plan.src.mesh().position_of(rank) || plan.dst.mesh().position_of(rank),
                 "plan: relays must be ranks of the source (", plan.src.mesh(), ") or of the destination (",
                 plan.dst.mesh(), "), got rank ", rank);
    }
  }
}

namespace {

// Throws UserError if the plan cannot be divided into its segments.
void check_segments(const Plan& plan) {
  const auto& [tensor_dim, count] = plan.segments;
  check_user(count == 1 || crosses(plan), "plan: segments must be 1 in a plan on one mesh, got ", count,
             " segments of tensor dim ", tensor_dim);
  check_user(count >= 1 && count <= kMaxSegments, "plan: segments must be ", InRange{1, kMaxSegments}, ", got ", count,
             " segments of tensor dim ", tensor_dim);
  const int64_t num_dims = count == 1 ? 1 : plan.src.ndim();
  check_user(tensor_dim >= 0 && tensor_dim < num_dims, "plan: tensor dim of ", count, " segments must be ",
             IndexInRange{num_dims, "tensor dims"}, ", got ", tensor_dim);
  check_user(can_run_in_segments(plan, plan.segments),
             "plan: the number of segments must divide the length of each range of each shard, or be at most ",
             kMaxNonUniformSegments, " on at most ", kMaxRanksInNonUniformSegments,
             " ranks, and each step must communicate at most once, got ", count, " segments of tensor dim ",
             tensor_dim);
}

}  // namespace

// Follows the layout of the tensor from step to step.
void check_steps(const Plan& plan) {
  check_meshes(plan);
  const Layout* at = &plan.src;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    check_user(step.before.mesh() == at->mesh(), "plan: step ", i + 1, " must begin on the mesh of the tensor (",
               at->mesh(), "), got (", step.before.mesh(), ")");
    check_user(partitions(*at, step.before, {}), "plan: step ", i + 1, " must begin with the tensor's placements (",
               PlacementsOf{*at}, "), got ", PlacementsOf{step.before});
    check_user(is_valid_move(step, plan.lowering), "plan: step ", i + 1, " must be a valid ", NameOf{step}, ", got ",
               PlacementsOf{step.before}, " -> ", PlacementsOf{step.after});
    const MeshDimSet reduced = step.before.partial_dims() - step.after.partial_dims();
    const bool is_kept = !crosses(plan) && !(reduced & plan.dst.partial_dims()).empty();
    check_user(!is_kept, "plan: step ", i + 1, " must keep the pending reductions of the destination (",
               PlacementsOf{plan.dst}, "), got ", PlacementsOf{step.after});
    at = &step.after;
  }
  std::optional<Layout> rejoined;
  if (!(at->mesh() == plan.dst.mesh())) rejoined = joined(*at, plan.dst.mesh_ptr());
  check_user(at->mesh() == plan.dst.mesh() || rejoined, "plan must end on the mesh of its destination (",
             plan.dst.mesh(), "), got ", PlacementsOf{*at}, " on (", at->mesh(), ")");
  check_segments(plan);
  check_user(partitions(rejoined.value_or(*at), plan.dst, {}), "plan must end with the placements ",
             PlacementsOf{plan.dst}, " of its destination, got ", PlacementsOf{*at});
}

}  // namespace shardwright
