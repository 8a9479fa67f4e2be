#include "planning/plan_cache.h"

#include "moves/traffic.h"
#include "planning/fit.h"

namespace shardwright {

const TrafficTotals& CertifiedPlan::traffic() const {
  const std::lock_guard lock(mutex_);
  if (!traffic_) traffic_ = totals(plan_);
  return *traffic_;
}

const Bound& CertifiedPlan::bound() const {
  const std::lock_guard lock(mutex_);
  if (!bound_) bound_ = lower_bound(plan_.src, plan_.dst);
  return *bound_;
}

int64_t CertifiedPlan::peak_bytes() const {
  const std::lock_guard lock(mutex_);
  if (!peak_bytes_) peak_bytes_ = shardwright::peak_bytes(plan_);
  return *peak_bytes_;
}

const Certificate& CertifiedPlan::certificate() const {
  const std::lock_guard lock(mutex_);
  if (!certificate_) certificate_ = certify(plan_, traffic(), bound(), peak_bytes());
  return *certificate_;
}

const std::vector<std::string>& CertifiedPlan::remarks() const {
  const std::lock_guard lock(mutex_);
  if (!remarks_) remarks_ = shardwright::remarks(plan_, certificate());
  return *remarks_;
}

size_t PlanRequest::hash() const {
  size_t hash = src.hash() * 31 + dst.hash();
  const auto mix = [&](uint64_t value) { hash = (hash ^ value) * 0x9E3779B97F4A7C15u; };
  mix(static_cast<uint64_t>(options.backend) * 4 + static_cast<uint64_t>(options.objective) * 2 + options.ordered);
  for (const MeshDimSet& dims : options.groups) mix(dims.bits());
  mix(static_cast<uint64_t>(memory_limit.value_or(-1)));
  return hash;
}

CertifiedPlanPtr PlanCache::get(const PlanRequest& request) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(&request);
    if (found != entries_.end()) {
      ++hits_;
      latest_first_.splice(latest_first_.begin(), latest_first_, found->second);
      return found->second->second;
    }
    ++misses_;
  }
  auto made = std::make_shared<const CertifiedPlan>(
      make_plan_within(request.src, request.dst, request.options, request.memory_limit));
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(&request);  // another thread may have been faster
  if (found != entries_.end()) return found->second->second;
  while (!latest_first_.empty() && latest_first_.size() >= capacity_) {
    entries_.erase(&latest_first_.back().first);
    latest_first_.pop_back();
  }
  latest_first_.emplace_front(request, made);
  entries_.emplace(&latest_first_.front().first, latest_first_.begin());
  return made;
}

PlanCache::Counts PlanCache::counts() const {
  const std::lock_guard lock(mutex_);
  return {hits_, misses_, static_cast<int64_t>(latest_first_.size())};
}

void PlanCache::reset_counts() {
  const std::lock_guard lock(mutex_);
  hits_ = misses_ = 0;
}

void PlanCache::clear() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
  latest_first_.clear();
}

}  // namespace shardwright
