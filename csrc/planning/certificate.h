// Certificates show how good a plan is: its costs next to lower bounds on the costs of any plan between the same
// layouts, and the reasons why a bound is not met. Fields `least_...` are these lower bounds.
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
  int64_t peak_bytes = 0;     // the most memory that a rank's program allocates: result and temporaries
  bool peak_is_exact = true;  // if false, some rank may allocate more
  int64_t predicted_ps = 0;   // predicted time of the plan, in picoseconds
  // True if all replicas of a reduced element hold the same bits: it is reduced in one group and then distributed, or
  // reduced in the same order everywhere, or the order does not matter, as for integers and for P(min) and P(max).
  // Elements that are not reduced cannot differ.
  bool replicas_are_bitwise_equal = true;

  Bound received;                // lower bounds on received bytes
  int64_t least_sent_bytes = 0;  // of the worst rank: an even share of all bytes that must be sent
  // Received by the worst rank. Each message at most doubles the number of ranks whose data a rank has.
  int64_t least_messages = 0;
  int64_t least_steps = 0;       // steps that communicate: 1, or 0 if no bytes must be sent
  int64_t least_peak_bytes = 0;  // of the worst rank: its part of the destination; 0 if the plan has no steps
  int64_t least_ps = 0;          // lower bound on the time with the plan's topology

  // Bounds for plans between two meshes; not set on one mesh. If set, least_sent_bytes is its any_sent_bytes_max.
  std::optional<ExchangeBound> crossing;
};

// A cost that has a lower bound, under the name that Python and JSON use.
struct BoundedValue {
  const char* name;
  int64_t value;
  int64_t bound;
};
// Returns all costs of a certificate that have a bound, in the order of the JSON.
std::vector<BoundedValue> bounded_values(const Certificate& certificate);

// Certifies a plan. `peak_bytes` is the peak memory of the worst rank's program (planning/memory_limit.h).
Certificate certify(const Plan& plan, const PeakBytes& peak_bytes);
// Certifies a plan whose `traffic`, totals(plan), and `received`, the lower_bound() of its layouts, are already known.
Certificate certify(const Plan& plan, const TrafficTotals& traffic, const Bound& received, const PeakBytes& peak_bytes);

// Returns a sentence for each bound that is not met, and for each property that the plan cannot guarantee; none if all
// is well. If the bound on received bytes is not met, searches for the plan with the fewest bytes for comparison.
std::vector<std::string> remarks(const Plan& plan, const Certificate& certificate);

}  // namespace shardwright
