#include "moves/segments.h"

#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "moves/digits.h"
#include "moves/exchange.h"
#include "support/error.h"

namespace shardwright {
namespace {

template <typename Visit>
void for_each_layout(const Plan& plan, const Visit& visit) {
  visit(plan.src);
  for (const Step& step : plan.steps) {
    visit(step.before);
    visit(step.after);
  }
  visit(plan.dst);
}

bool communicates_once(const Step& step, Lowering lowering) {
  if (step.op == StepOp::kRearrange || step.rounds > 1) return false;
  const int64_t size = step.before.mesh().group_size(step.mesh_dims);
  return is_local(step.op) || collectives_of(step.op, size, reduces_natively(step, lowering)) == 1;
}

// The lengths of all parts of a list of n elements, where each is one run of the list.
std::vector<int64_t> lengths_of_runs(const Cut& cut, int64_t n, int64_t k) {
  std::vector<int64_t> lengths;
  for (int64_t c = 0; c < k; ++c) lengths.push_back(cut.rule.length(n, k, c));
  return lengths;
}

// The cells of one layout: the greatest common divisor of the lengths of all runs. The last cut may make runs of
// unequal lengths; other unequal parts have no cells.
int64_t cell_of(const Layout& layout, int tensor_dim) {
  const std::vector<Cut>& cuts = layout.cuts(tensor_dim);
  const int64_t n = layout.shape()[tensor_dim];
  int64_t cell = n;
  const auto add = [&](const std::vector<Digit>& digits) {
    for (const Digit& digit : digits) cell = std::gcd(cell, digit.weight);
  };
  if (const auto digits = digits_of(layout.mesh(), n, cuts)) {
    add(*digits);
    return cell;
  }
  const std::vector<Cut> before(cuts.begin(), cuts.end() - 1);
  const auto digits = digits_of(layout.mesh(), n, before);
  if (!digits || !cuts.back().rule.makes_runs()) return 0;
  add(*digits);
  int64_t list = n;
  for (const Cut& cut : before) list /= layout.mesh().dim_size(cut.mesh_dim);
  for (const int64_t length : lengths_of_runs(cuts.back(), list, layout.mesh().dim_size(cuts.back().mesh_dim))) {
    cell = std::gcd(cell, length);
  }
  return cell;
}

// Rules may name sizes that a segment does not have, so the shorter dim is cut by the strided cuts that make the same
// parts, or by runs that are as many times shorter. Mesh dims of size 1 cut nothing.
std::vector<Placement> placements_of_segment(const Layout& layout, const Segments& segments) {
  const int tensor_dim = segments.tensor_dim;
  std::vector<Placement> placements = layout.placements();
  for (Placement& placement : placements) {
    if (placement.is_shard_like() && placement.dim == tensor_dim) placement = Placement::shard(tensor_dim);
  }
  int64_t left = layout.shape()[tensor_dim];
  for (const Cut& cut : layout.cuts(tensor_dim)) {
    const int64_t k = layout.mesh().dim_size(cut.mesh_dim);
    const std::optional<int64_t> split_factor = cut.rule.equal_split_factor(left, k);
    if (split_factor) {
      placements[cut.mesh_dim] = Placement::cut(tensor_dim, *split_factor);
      left /= k;
      continue;
    }
    check_invariant(cut.rule.makes_runs(), "segments of ", layout.to_string(), ", whose parts have no cells");
    std::vector<int64_t> lengths = lengths_of_runs(cut, left, k);
    for (int64_t& length : lengths) length /= segments.count;
    placements[cut.mesh_dim] = Placement::cut(tensor_dim, CutRule::ragged(lengths));
  }
  return placements;
}

}  // namespace

int64_t cell_length(const Plan& plan, int tensor_dim) {
  int64_t cell = plan.src.shape()[tensor_dim];
  for_each_layout(plan, [&](const Layout& layout) {
    if (layout.flattened() > 1) cell = 0;  // it has other dims
    if (cell == 0 || layout.cuts(tensor_dim).empty()) return;
    const int64_t own = cell_of(layout, tensor_dim);
    cell = own == 0 ? 0 : std::gcd(cell, own);
  });
  return cell;
}

bool may_go_in(const Plan& plan, const Segments& segments) {
  if (segments.count == 1) return segments.tensor_dim == 0;
  if (segments.count < 1 || segments.count > kMaxSegments || !crosses(plan)) return false;
  if (segments.tensor_dim < 0 || segments.tensor_dim >= plan.src.ndim()) return false;
  bool may = true;
  for (const Step& step : plan.steps) may = may && communicates_once(step, plan.lowering);
  const int64_t cell = may ? cell_length(plan, segments.tensor_dim) : 0;
  return cell > 0 && cell % segments.count == 0;
}

Layout layout_of_segment(const Layout& layout, const Segments& segments) {
  std::vector<int64_t> shape = layout.shape();
  shape[segments.tensor_dim] /= segments.count;
  ShardOrder order;
  const Mesh& mesh = layout.mesh();
  for (int t = 0; t < layout.ndim(); ++t) {
    std::vector<int>& mesh_dims = order[t];
    for (const Cut& cut : layout.cuts(t)) mesh_dims.push_back(cut.mesh_dim);
    // Mesh dims of size 1 cut nothing and have no place in the order; Layout wants them named all the same.
    for (int d = 0; d < mesh.ndim(); ++d) {
      const Placement& placement = layout.placements()[d];
      if (placement.is_shard_like() && placement.dim == t && mesh.dim_size(d) == 1) mesh_dims.push_back(d);
    }
  }
  return Layout(layout.mesh_ptr(), std::move(shape), layout.dtype(), placements_of_segment(layout, segments), order,
                StridedMeaning::kLiteral);
}

Plan plan_of_segment(const Plan& plan) {
  Plan segment{layout_of_segment(plan.src, plan.segments),
               layout_of_segment(plan.dst, plan.segments),
               plan.lowering,
               plan.objective,
               plan.topology,
               plan.named_groups_only,
               plan.steps};
  for (Step& step : segment.steps) {
    step.before = layout_of_segment(step.before, plan.segments);
    step.after = layout_of_segment(step.after, plan.segments);
  }
  return segment;
}

}  // namespace shardwright
