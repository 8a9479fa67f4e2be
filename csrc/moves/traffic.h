// What moves send and receive: exact counts for one rank, totals over all, and what no plan can go below.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "moves/exchange.h"
#include "moves/extremes.h"
#include "moves/plan.h"

namespace shardwright {

// Of any step on one mesh.
class StepTraffic {
 public:
  StepTraffic(const Step& step, Lowering lowering);
  Traffic at(int64_t position) const;
  // By what at() depends on.
  void tell_apart(RankClasses& classes) const;
  // What no rank has more of; nothing where parts are unequal.
  std::optional<Traffic> at_most() const;
  const Step& step() const { return step_; }

 private:
  const Step& step_;
  ExchangeTraffic exchange_;
  bool is_native_;
};

// None where the rank is not on the mesh of the step, or neither of a crossing's. Of a plan: of all its steps.
Traffic traffic_at(const Step& step, Lowering lowering, Rank rank);
Traffic traffic_at(const Plan& plan, Rank rank);

struct TrafficTotals {
  int64_t received_bytes_max = 0;
  int64_t received_bytes_sum = 0;
  int64_t sent_bytes_max = 0;
  int64_t messages_max = 0;
  int64_t steps = 0;  // those that communicate, rounds counted
  bool sum_is_exact = true;
  bool maxima_are_exact = true;
};

// Of one step, and of the whole plan (maxima are of ranks' sums over steps). Ranks are told apart by the coordinates
// that their figures depend on (moves/extremes.h); of up to kMaxRanksWalked classes one rank each is looked at, and all
// is exact. For more, maxima are those of outermost and boundary coordinates: exact where no rank can have more, else
// lower bounds. The sum is worked out without a walk, or else is an upper bound. Between two meshes all ranks are
// looked at, and all is exact.
TrafficTotals totals(const Step& step, Lowering lowering);
TrafficTotals totals(const Plan& plan);

// What no plan can go below. Without P a rank must receive what it needs and does not hold. With P, over all ranks,
// each element takes at least (contributions - 1) + (destination holders - 1) transfers, and bytes_max is the
// mean of that. Between two meshes: as in crossing/bounds.h.
struct Bound {
  int64_t bytes_max = 0;
  int64_t bytes_sum = 0;
};

Bound lower_bound(const Layout& src, const Layout& dst);

}  // namespace shardwright
