// Certificates show how good a plan is: each figure next to a lower bound for any plan, and why a bound is not met.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "exchange/bounds.h"
#include "moves/plan.h"
#include "moves/traffic.h"
#include "program/memory.h"

namespace shardwright {

struct Certificate {
  TrafficTotals traffic;
  int64_t peak_bytes = 0;
  bool peak_is_exact = true;  // if not, some rank may allocate more
  int64_t predicted_ps = 0;
  // True if all replicas of a reduced element hold the same bits, because it is reduced in one group and then
  // distributed, or in the same order everywhere. Elements that are not reduced cannot differ.
  bool replicas_are_bitwise_equal = true;

  Bound received;                // bytes
  int64_t least_sent_bytes = 0;  // by the worst rank: an even share of all bytes that must be sent
  int64_t least_messages = 0;    // each message at best doubles the number of ranks whose data a rank has
  int64_t least_steps = 0;       // steps that communicate
  int64_t least_peak_bytes = 0;  // the destination, unless it is the source itself
  int64_t least_ps = 0;          // with the plan's topology

  // Between two meshes; least_sent_bytes is its any_sent_bytes_max then.
  std::optional<ExchangeBound> crossing;
};

// The figures that have a bound, under the names that Python and JSON use.
struct Figure {
  const char* name;
  int64_t value;
  int64_t bound;
};
std::vector<Figure> figures_of(const Certificate& certificate);

// `peak_bytes` is that of the worst rank's program (planning/fit.h).
Certificate certify(const Plan& plan, const PeakBytes& peak_bytes);
// The same with the plan's totals and bound, where they are already known.
Certificate certify(const Plan& plan, const TrafficTotals& traffic, const Bound& received, const PeakBytes& peak_bytes);

// Returns a sentence for each bound that is not met, and for each property that the plan cannot guarantee. Makes the
// plan with the fewest bytes for comparison.
std::vector<std::string> remarks(const Plan& plan, const Certificate& certificate);

}  // namespace shardwright
