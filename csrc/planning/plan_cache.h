// Plans by what was asked for, so that asking again costs a lookup.
#pragma once

#include <cstddef>

#include "planning/context.h"
#include "support/bounded_cache.h"

namespace shardwright {

// What a plan depends on, all of it: the key under which plans are kept.
struct PlanRequest {
  Layout src;
  Layout dst;
  ContextPtr context;  // not null

  bool operator==(const PlanRequest& other) const {
    return (context == other.context || *context == *other.context) && src == other.src && dst == other.dst;
  }
  size_t hash() const { return (src.hash() * 31 + dst.hash()) * 31 + context->hash(); }
};

// Bounded; any thread may ask, and nothing is planned under the lock.
class PlanCache {
  struct Hash {
    size_t operator()(const PlanRequest& request) const { return request.hash(); }
  };
  using Plans = BoundedCache<PlanRequest, CertifiedPlanPtr, Hash>;

 public:
  static constexpr size_t kDefaultCapacity = 4096;

  explicit PlanCache(size_t capacity = kDefaultCapacity) : plans_(capacity) {}

  // The plan that is pinned in this context, else the one that was made before, else a new one. Throws as
  // make_plan_within does, and keeps nothing then.
  CertifiedPlanPtr get(const PlanRequest& request);

  using Counts = Plans::Counts;
  Counts counts() const { return plans_.counts(); }
  void reset_counts() { plans_.reset_counts(); }
  void clear() { plans_.clear(); }

 private:
  Plans plans_;
};

// That of this process: for redistributes and for products.
PlanCache& plan_cache();

}  // namespace shardwright
