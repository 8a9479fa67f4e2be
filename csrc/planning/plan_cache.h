// The process-wide cache of plans.
#pragma once

#include <cstddef>

#include "cost/topology.h"
#include "planning/context.h"
#include "support/bounded_cache.h"

namespace shardwright {

// The key of the cache: everything that a plan depends on, and the topologies of the meshes, which the plan contains.
struct PlanRequest {
  Layout src;
  Layout dst;
  ContextPtr context;  // not null

  bool operator==(const PlanRequest& other) const {
    return (context == other.context || *context == *other.context) && src == other.src && dst == other.dst &&
           same_topology(src.mesh(), other.src.mesh()) && same_topology(dst.mesh(), other.dst.mesh());
  }
  size_t hash() const { return (src.hash() * 31 + dst.hash()) * 31 + context->hash(); }
};

// A bounded, thread-safe cache that drops the least recently used plan first. Plans are made outside the lock, so two
// threads may make the same plan; both get the plan that was stored first.
class PlanCache {
  struct Hash {
    size_t operator()(const PlanRequest& request) const { return request.hash(); }
  };
  using Plans = BoundedCache<PlanRequest, CertifiedPlanPtr, Hash>;

 public:
  static constexpr size_t kDefaultCapacity = 4096;  // plans

  explicit PlanCache(size_t capacity = kDefaultCapacity) : plans_(capacity) {}

  // Returns the plan that is pinned in the context, else the cached plan, else a new plan, which it caches. Throws as
  // make_plan_within does, and then caches nothing.
  CertifiedPlanPtr get(const PlanRequest& request);

  using Counts = Plans::Counts;  // hits, misses and number of cached plans
  Counts counts() const { return plans_.counts(); }
  void reset_counts() { plans_.reset_counts(); }
  void clear() { plans_.clear(); }

 private:
  Plans plans_;
};

// The cache of this process, for the plans of redistributes and of products.
PlanCache& plan_cache();

}  // namespace shardwright
