// The cheapest redistribute after which a view moves nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planning/plan_cache.h"
#include "search/options.h"
#include "views/view.h"

namespace shardwright {

// Of more destinations than these, some are left out: first those that cut along the last mesh dims.
constexpr size_t kMaxDestinations = 1024;
// If none of the first of them has a view, only the one at which nothing is cut is left. It always has.
constexpr int64_t kMaxViewsBeforeMove = 300;
// The search ends after this many plans.
constexpr int64_t kMaxPlansBeforeView = 32;

struct MoveFirst {
  CertifiedPlanPtr plan;  // from the layout to one of the same shape
  Layout view;            // the view of its destination
  int64_t views = 0;      // of how many destinations the view was looked for
  int64_t plans = 0;      // how many plans were made
};

// The views that count: all, or those that DTensor can say (dtensor_view_of).
enum class ViewsFor : uint8_t { kAnyone, kDTensor };

// Returns the plan with the least predicted time among those to layouts that differ from `layout` in the mesh dims of
// `why` alone, each of which then cuts one tensor dim into chunks or none, and of which the view moves nothing. `why`
// is about the first dims that have no view; if others have none either, all mesh dims that cut may differ. There
// always is a plan, because a tensor that no mesh dim cuts may have any shape. Of several with the same time, one with
// fewer bytes received is returned, then one whose parts are smaller.
//
// Left out are destinations with a cut after which the view would need a move even if nothing else were cut there. The
// others are looked at in the order of a lower bound on the time of any plan to them, until it exceeds the best time.
MoveFirst cheapest_move(const Layout& layout, const std::vector<int64_t>& shape, int flattened, const NoView& why,
                        const PlanOptions& options, ViewsFor views_for = ViewsFor::kAnyone);

// Says that a view is none, why, and what to do first, with its cost:
// "shape: (3, 4) of float32[12] on a=2 as [S(0)] needs a move, because rank 0 holds ...; allowed is the view after a
// redistribute to [R], which takes 4.3 us and 24 B received by a rank (nccl)".
std::string text_of(const Layout& layout, const std::vector<int64_t>& shape, const NoView& why, const MoveFirst& first);

}  // namespace shardwright
