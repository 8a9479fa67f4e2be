#include "planning/plan_cache.h"

#include <memory>

#include "planning/memory_limit.h"

namespace shardwright {

CertifiedPlanPtr PlanCache::get(const PlanRequest& request) {
  const PlanningContext& context = *request.context;
  if (CertifiedPlanPtr pinned = context.pinned(request.src, request.dst)) return pinned;
  const auto make = [&] {
    return std::make_shared<const CertifiedPlan>(
        make_plan_within(request.src, request.dst, context.options(), context.memory_limit()));
  };
  // Plans found by the search do not depend on pins, so they stay cached when pins change.
  if (context.has_pins()) return plans_.get_or_make({request.src, request.dst, context.without_pins()}, make);
  return plans_.get_or_make(request, make);
}

PlanCache& plan_cache() {
  static PlanCache cache;
  return cache;
}

}  // namespace shardwright
