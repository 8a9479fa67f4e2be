// Plans by what was asked for, so that asking again costs a lookup.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "moves/plan.h"
#include "moves/traffic.h"
#include "planning/certificate.h"
#include "search/options.h"

namespace shardwright {

// A plan, and what there is to know of it, worked out once when it is first asked for. Any thread may ask.
class CertifiedPlan {
 public:
  explicit CertifiedPlan(Plan plan) : plan_(std::move(plan)) {}

  const Plan& plan() const { return plan_; }
  const TrafficTotals& traffic() const;
  const Bound& bound() const;
  int64_t peak_bytes() const;
  const Certificate& certificate() const;
  const std::vector<std::string>& remarks() const;

 private:
  Plan plan_;
  mutable std::recursive_mutex mutex_;
  mutable std::optional<TrafficTotals> traffic_;
  mutable std::optional<Bound> bound_;
  mutable std::optional<int64_t> peak_bytes_;
  mutable std::optional<Certificate> certificate_;
  mutable std::optional<std::vector<std::string>> remarks_;
};

using CertifiedPlanPtr = std::shared_ptr<const CertifiedPlan>;

// What a plan depends on.
struct PlanRequest {
  Layout src;
  Layout dst;
  PlanOptions options;
  std::optional<int64_t> memory_limit;

  bool operator==(const PlanRequest& other) const = default;
  size_t hash() const;
};

// Bounded; the plan that was asked for longest ago goes first.
class PlanCache {
 public:
  static constexpr size_t kDefaultCapacity = 4096;

  explicit PlanCache(size_t capacity = kDefaultCapacity) : capacity_(capacity) {}

  // Throws as make_plan_within does, and keeps nothing then.
  CertifiedPlanPtr get(const PlanRequest& request);

  struct Counts {
    int64_t hits = 0;
    int64_t misses = 0;
    int64_t size = 0;
  };
  Counts counts() const;
  void reset_counts();
  void clear();

 private:
  struct Hash {
    size_t operator()(const PlanRequest* request) const { return request->hash(); }
  };
  struct Equal {
    bool operator()(const PlanRequest* a, const PlanRequest* b) const { return *a == *b; }
  };
  using Entry = std::pair<PlanRequest, CertifiedPlanPtr>;

  size_t capacity_;
  mutable std::mutex mutex_;
  std::list<Entry> latest_first_;
  std::unordered_map<const PlanRequest*, std::list<Entry>::iterator, Hash, Equal> entries_;
  int64_t hits_ = 0;
  int64_t misses_ = 0;
};

}  // namespace shardwright
