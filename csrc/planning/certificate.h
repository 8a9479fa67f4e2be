// How good a plan is: its figures beside what no plan can go below, and why it does not meet a bound where it does not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moves/plan.h"
#include "moves/traffic.h"
#include "program/memory.h"

namespace shardwright {

struct Certificate {
  TrafficTotals traffic;
  int64_t peak_bytes = 0;
  bool peak_is_exact = true;  // else some rank may allocate more
  int64_t predicted_ps = 0;
  // Replicas of a reduced element hold the same bits: it is reduced in one group and then shared, or in the same order
  // everywhere. Only what is reduced can differ.
  bool replicas_are_bitwise_equal = true;

  Bound received;                // bytes
  int64_t least_sent_bytes = 0;  // by the worst rank: all must be sent by somebody
  int64_t least_messages = 0;    // a rank learns of twice as many ranks with each message at best
  int64_t least_steps = 0;       // that communicate
  int64_t least_peak_bytes = 0;  // the destination, where it is not the source itself
  int64_t least_ps = 0;          // by the topology
};

// Every figure that has a bound, by the name that Python and JSON give it.
struct Figure {
  const char* name;
  int64_t value;
  int64_t bound;
};
std::vector<Figure> figures_of(const Certificate& certificate);

// `peak_bytes`: of the program of the worst rank (planning/fit.h).
Certificate certify(const Plan& plan, const PeakBytes& peak_bytes);
// With totals and bound of the plan that are known already.
Certificate certify(const Plan& plan, const TrafficTotals& traffic, const Bound& received, const PeakBytes& peak_bytes);

// A sentence for each bound that is not met, and for what the plan cannot promise. Plans once more, for comparison.
std::vector<std::string> remarks(const Plan& plan, const Certificate& certificate);

}  // namespace shardwright
