#include "planning/certified_plan.h"

#include "moves/describe.h"
#include "planning/memory_limit.h"

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
  if (!peak_bytes_) peak_bytes_ = max_peak_bytes(plan_);
  return peak_bytes_->bytes;
}

const Certificate& CertifiedPlan::certificate() const {
  const std::lock_guard lock(mutex_);
  peak_bytes();
  if (!certificate_) certificate_ = certify(plan_, traffic(), bound(), *peak_bytes_);
  return *certificate_;
}

const std::vector<std::string>& CertifiedPlan::remarks() const {
  const std::lock_guard lock(mutex_);
  if (!remarks_) remarks_ = shardwright::remarks(plan_, certificate());
  return *remarks_;
}

std::string CertifiedPlan::text() const { return to_string(plan_, &traffic()); }

}  // namespace shardwright
