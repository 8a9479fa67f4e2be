#include "views/move_first.h"

#include <tuple>
#include <utility>

#include "moves/figures.h"
#include "planning/context.h"
#include "support/error.h"
#include "support/text.h"

namespace shardwright {
namespace {

// Every way in which these mesh dims cut a dim into chunks or replicate, the others cutting as they do. What they cut
// comes after what is cut already.
std::vector<Layout> destinations(const Layout& layout, MeshDimSet mesh_dims) {
  std::vector<std::vector<Cut>> kept;
  for (const std::vector<Cut>& list : layout.cuts()) {
    kept.emplace_back();
    for (const Cut& c : list) {
      if (!mesh_dims.contains(c.mesh_dim)) kept.back().push_back(c);
    }
  }
  std::vector<std::vector<std::vector<Cut>>> all{std::move(kept)};
  for (const int d : mesh_dims.to_vector()) {
    const size_t count = all.size();
    for (size_t i = 0; i < count; ++i) {
      for (int t = 0; t < layout.ndim(); ++t) {
        all.push_back(all[i]);
        all.back()[static_cast<size_t>(t)].push_back({d, CutRule()});
      }
    }
  }
  std::vector<Layout> layouts;
  for (std::vector<std::vector<Cut>>& cuts : all) layouts.push_back(layout.with(std::move(cuts), layout.placements()));
  return layouts;
}

// Whether rules that cut lists of one length only still do where other cuts are gone.
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

// The cheapest after which these mesh dims cut otherwise; nothing if none makes it a view.
std::optional<MoveFirst> cheapest_of(const Layout& layout, const std::vector<int64_t>& shape, int flattened,
                                     MeshDimSet mesh_dims, const ContextPtr& context, ViewsFor views_for) {
  std::optional<MoveFirst> best;
  std::tuple<int64_t, int64_t, int64_t> least;
  for (const Layout& dst : destinations(layout, mesh_dims)) {
    if (!is_possible(dst) || (views_for == ViewsFor::kDTensor && !is_known_to_dtensor(dst))) continue;
    auto view = views_for == ViewsFor::kDTensor ? dtensor_view_of(dst, shape) : view_of(dst, shape, flattened);
    if (!std::holds_alternative<Layout>(view)) continue;
    const CertifiedPlanPtr plan = plan_cache().get({layout, dst, context});
    const std::tuple cost(predicted_picoseconds(plan->plan()), plan->traffic().received_bytes_max,
                          dst.largest_part_elements());
    if (best && least <= cost) continue;
    least = cost;
    best = MoveFirst{plan, std::get<Layout>(std::move(view))};
  }
  return best;
}

}  // namespace

MoveFirst cheapest_move(const Layout& layout, const std::vector<int64_t>& shape, int flattened, const NoView& why,
                        const PlanOptions& options, ViewsFor views_for) {
  const ContextPtr context = PlanningContext::make(options);
  std::optional<MoveFirst> best = cheapest_of(layout, shape, flattened, why.mesh_dims, context, views_for);
  if (!best) best = cheapest_of(layout, shape, flattened, layout.cut_dims(), context, views_for);
  check_invariant(best.has_value(), "no redistribute of ", layout.to_string(), " makes (", join(shape), ") a view");
  return *best;
}

std::string text_of(const Layout& layout, const std::vector<int64_t>& shape, const NoView& why,
                    const MoveFirst& first) {
  const Plan& plan = first.plan->plan();
  return concat("shape: (", join(shape), ") of ", layout.to_string(), " needs a move, because ", why.reason,
                "; allowed is this view after a redistribute to ", plan.dst.placements_string(), ", which takes ",
                microseconds_text(predicted_picoseconds(plan)), " and ",
                bytes_text(first.plan->traffic().received_bytes_max), " received by a rank (", plan.lowering.name, ")");
}

}  // namespace shardwright
