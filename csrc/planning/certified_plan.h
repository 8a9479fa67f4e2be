// Plans together with their costs and certificates.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "moves/plan.h"
#include "moves/traffic.h"
#include "planning/certificate.h"

namespace shardwright {

// A plan whose traffic, bound, peak memory, certificate and remarks are each computed on first use and then cached.
// Thread-safe.
class CertifiedPlan {
 public:
  explicit CertifiedPlan(Plan plan) : plan_(std::move(plan)) {}

  const Plan& plan() const { return plan_; }
  const TrafficTotals& traffic() const;
  const Bound& bound() const;  // on received bytes
  int64_t peak_bytes() const;  // of the worst rank's program
  const Certificate& certificate() const;
  const std::vector<std::string>& remarks() const;
  std::string text() const;  // the plan as text (moves/describe.h)

 private:
  Plan plan_;
  mutable std::recursive_mutex mutex_;
  mutable std::optional<TrafficTotals> traffic_;
  mutable std::optional<Bound> bound_;
  mutable std::optional<PeakBytes> peak_bytes_;
  mutable std::optional<Certificate> certificate_;
  mutable std::optional<std::vector<std::string>> remarks_;
};

using CertifiedPlanPtr = std::shared_ptr<const CertifiedPlan>;

}  // namespace shardwright
