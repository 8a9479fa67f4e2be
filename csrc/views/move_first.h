// Finds the cheapest redistribute after which a view moves nothing. A *destination* is a layout of the same shape to
// which the redistribute may lead.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planning/plan_cache.h"
#include "search/options.h"
#include "views/view.h"

namespace shardwright {

constexpr size_t kMaxDestinations = 1024;  // further destinations, which cut along the last mesh dims, are dropped
// If none of this many destinations has a view, the search goes on with the uncut destination, which always has one.
constexpr int64_t kMaxViewsBeforeMove = 300;
constexpr int64_t kMaxPlansBeforeView = 32;  // the search ends after this many plans

// A redistribute to do before a view, and the view.
struct MoveFirst {
  CertifiedPlanPtr plan;  // from the layout to a layout of the same shape
  Layout view;            // the view of the plan's destination
  int64_t views = 0;      // number of destinations whose view was computed
  int64_t plans = 0;      // number of plans made
};

// The allowed views: all, or only views that DTensor can express (dtensor_view_of).
enum class ViewsFor : uint8_t { kAnyone, kDTensor };

// Returns the plan with the least predicted time from `layout` to a destination that has a view of this shape, and the
// view. The first `flattened` dims of the shape are flattened in the view; kDTensor ignores the number. Ties are broken
// by fewer bytes received, then by smaller parts. `why` is the reason why `layout` has no view.
//
// In a destination, each mesh dim of why.mesh_dims cuts one tensor dim into chunks or replicates. All other mesh dims
// cut as in `layout`. If no such destination has a view, because another group of dims (views/view.h) prevents it too,
// the search is repeated with all mesh dims that cut in place of why.mesh_dims. It then finds a plan, because a
// destination without cuts has a view of any shape. Throws UserError if view_of() (views/view.h) does.
//
// A cut by a changed mesh dim is not tried if it prevents the view even with all other changed mesh dims replicated.
// Destinations are tried in the order of a lower bound on the time of any plan to them, until the bound exceeds the
// best time or one of the limits above is reached.
MoveFirst cheapest_move(const Layout& layout, const std::vector<int64_t>& shape, int flattened, const NoView& why,
                        const PlanOptions& options, ViewsFor views_for = ViewsFor::kAnyone);

// Returns the text of the error for a view that needs a move: the reason, the redistribute to do first, and its cost.
// "shape must need no move, got (3, 4) for float32[12] on a=2 as [S(0)]: rank 0 holds ...; redistribute to [R] first,
// which takes 4.3 us and 24 B received by a rank (nccl)".
std::string move_first_text(const Layout& layout, const std::vector<int64_t>& shape, const NoView& why,
                            const MoveFirst& first);

}  // namespace shardwright
