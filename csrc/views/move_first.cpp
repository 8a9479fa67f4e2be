#include "views/move_first.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "moves/step_counts.h"
#include "planning/context.h"
#include "search/make_plan.h"
#include "support/error.h"
#include "support/text.h"

namespace shardwright {
namespace {

using Cuts = std::vector<std::vector<Cut>>;

// A request: a layout that shall be redistributed, and the shape in which the result shall be viewed.
struct Wanted {
  const Layout& layout;
  const std::vector<int64_t>& shape;
  int flattened;
  ViewsFor views_for;

  // Returns the destination with these cuts, by tensor dim. Pending reductions stay.
  Layout with(const Cuts& cuts) const { return layout.with(cuts, layout.placements()); }
  // Returns the view of a destination, or nullopt if the destination is not possible or has no allowed view.
  std::optional<Layout> view_after(const Layout& dst) const;
};

// Returns true if the rule of every cut can cut a list of the length that the cuts before it leave. Checks a tensor dim
// up to its first uneven cut.
bool is_possible(const Layout& layout) {
  for (int t = 0; t < layout.ndim(); ++t) {
    int64_t n = layout.shape()[static_cast<size_t>(t)];
    for (const Cut& c : layout.cuts(t)) {
      const int64_t k = layout.mesh().dim_size(c.mesh_dim);
      if (!c.rule.why_not(n, k).empty()) return false;
      if (!c.rule.cuts_evenly(n, k)) break;
      n /= k;
    }
  }
  return true;
}

std::optional<Layout> Wanted::view_after(const Layout& dst) const {
  if (!is_possible(dst) || (views_for == ViewsFor::kDTensor && !is_known_to_dtensor(dst))) return std::nullopt;
  auto view = views_for == ViewsFor::kDTensor ? dtensor_view_of(dst, shape) : view_of(dst, shape, flattened);
  if (!std::holds_alternative<Layout>(view)) return std::nullopt;
  return std::get<Layout>(std::move(view));
}

// Returns the layouts in which each mesh dim of `mesh_dims` cuts one tensor dim into chunks or replicates. All other
// mesh dims keep their cuts, outermost. A cut is skipped if it prevents the view even with the rest of `mesh_dims`
// replicated.
std::vector<Layout> destinations(const Wanted& wanted, MeshDimSet mesh_dims) {
  Cuts kept;
  for (const std::vector<Cut>& list : wanted.layout.cuts()) {
    kept.emplace_back();
    for (const Cut& c : list) {
      if (!mesh_dims.contains(c.mesh_dim)) kept.back().push_back(c);
    }
  }
  std::vector<Cuts> all{kept};
  const auto cut = [](Cuts cuts, int t, int d) {
    cuts[static_cast<size_t>(t)].push_back({d, CutRule()});
    return cuts;
  };
  for (const int d : mesh_dims.to_vector()) {
    const size_t count = all.size();
    for (int t = 0; t < wanted.layout.ndim(); ++t) {
      if (all.size() + count > kMaxDestinations || !wanted.view_after(wanted.with(cut(kept, t, d)))) continue;
      for (size_t i = 0; i < count; ++i) all.push_back(cut(all[i], t, d));
    }
  }
  std::vector<Layout> layouts;
  for (const Cuts& cuts : all) layouts.push_back(wanted.with(cuts));
  return layouts;
}

struct Candidate {
  Layout layout;     // a destination
  int64_t least_ps;  // lower bound on the time of any plan to the layout
};

// Returns the possible destinations by ascending lower bound.
std::vector<Candidate> candidates(const Wanted& wanted, MeshDimSet mesh_dims, const PlanningContext& context) {
  std::vector<Candidate> possible;
  for (Layout& dst : destinations(wanted, mesh_dims)) {
    if (!is_possible(dst)) continue;
    const Plan none{wanted.layout, dst, context.lowering(), context.options().objective, context.topology(), false, {}};
    const int64_t least = least_picoseconds(none);
    possible.push_back({std::move(dst), least});
  }
  std::stable_sort(possible.begin(), possible.end(),
                   [](const Candidate& a, const Candidate& b) { return a.least_ps < b.least_ps; });
  return possible;
}

// Returns the cheapest move that changes the cuts of these mesh dims only, or nullopt if none leads to a view.
std::optional<MoveFirst> cheapest_of(const Wanted& wanted, MeshDimSet mesh_dims, const ContextPtr& context) {
  std::optional<MoveFirst> best;
  std::tuple<int64_t, int64_t, int64_t> least;  // cost of `best`: picoseconds, bytes received, largest part in elements
  int64_t views = 0, plans = 0;
  for (const Candidate& candidate : candidates(wanted, mesh_dims, *context)) {
    if (best && (candidate.least_ps > std::get<0>(least) || plans == kMaxPlansBeforeView)) break;
    const bool cuts_nothing = (candidate.layout.cut_dims() & mesh_dims).empty();
    if (views >= kMaxViewsBeforeMove && !best && !cuts_nothing) continue;
    ++views;
    std::optional<Layout> view = wanted.view_after(candidate.layout);
    if (!view) continue;
    ++plans;
    const CertifiedPlanPtr plan = plan_cache().get({wanted.layout, candidate.layout, context});
    const std::tuple cost(predicted_picoseconds(plan->plan()), plan->traffic().received_bytes_max,
                          candidate.layout.largest_part_elements());
    if (best && least <= cost) continue;
    least = cost;
    best = MoveFirst{plan, *std::move(view)};
  }
  if (best) {
    best->views = views;
    best->plans = plans;
  }
  return best;
}

}  // namespace

// First changes only the mesh dims of `why`; if no such destination has a view, changes all mesh dims that cut.
MoveFirst cheapest_move(const Layout& layout, const std::vector<int64_t>& shape, int flattened, const NoView& why,
                        const PlanOptions& options, ViewsFor views_for) {
  const ContextPtr context = PlanningContext::make(options);
  const Wanted wanted{layout, shape, flattened, views_for};
  std::optional<MoveFirst> best = cheapest_of(wanted, why.mesh_dims, context);
  if (!best) best = cheapest_of(wanted, layout.cut_dims(), context);
  check_invariant(best.has_value(), "no redistribute of ", layout, " makes (", join(shape), ") a view");
  return *best;
}

std::string move_first_text(const Layout& layout, const std::vector<int64_t>& shape, const NoView& why,
                            const MoveFirst& first) {
  const Plan& plan = first.plan->plan();
  std::string text = concat(
      "shape must need no move, got (", join(shape), ") for ", layout, ": ", why.reason, "; redistribute to ",
      plan.dst.placements_string(), " first, which takes ", microseconds_text(predicted_picoseconds(plan)), " and ",
      bytes_text(first.plan->traffic().received_bytes_max), " received by a rank (", plan.lowering.name, ")");
  if (why.on_parts) {
    text +=
        concat(", or view the local parts, which moves nothing: shardwright.views.view(x.to_local(), [", join(shape),
               "], layout), where layout is a shardwright.Layout with the mesh, shape and placements of x");
  }
  return text;
}

}  // namespace shardwright
