// The bytes and messages of moves: exact counts for one rank, totals over all ranks, and lower bounds for any plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/mesh_exchange.h"
#include "moves/collectives.h"
#include "moves/extremes.h"
#include "moves/plan.h"

namespace shardwright {

// The traffic of any step on one mesh, reductions included.
class StepTraffic {
 public:
  StepTraffic(const Step& step, Lowering lowering);
  Traffic at(int64_t position) const;
  // Splits the classes of ranks by everything that at() depends on.
  void tell_apart(RankClasses& classes) const;
  // An upper bound for all ranks; nothing if parts are unequal.
  std::optional<Traffic> at_most() const;
  const Step& step() const { return step_; }

 private:
  const Step& step_;
  MeshExchange exchange_;
  bool is_native_;
};

// The traffic of the ranks of any step.
class TrafficOfRanks {
 public:
  TrafficOfRanks(const Step& step, Lowering lowering);
  Traffic at(Rank rank) const;
  bool communicates() const;

 private:
  const Step& step_;
  std::optional<StepTraffic> on_mesh_;
  std::unique_ptr<const Exchange> exchange_;  // of other steps
};

// The traffic of one rank in a step, or in all steps of a plan. It is zero if the rank is not on the mesh of the step,
// or on neither mesh of a crossing.
Traffic traffic_at(const Step& step, Lowering lowering, Rank rank);
Traffic traffic_at(const Plan& plan, Rank rank);

// Returns whether some rank sends something: always if the step is not local, unless it is a crossing between ranks
// that hold what they need.
bool communicates(const Step& step);

struct TrafficTotals {
  int64_t received_bytes_max = 0;
  int64_t received_bytes_sum = 0;
  int64_t sent_bytes_max = 0;
  int64_t messages_max = 0;  // received
  int64_t sent_messages_max = 0;
  int64_t steps = 0;  // that communicate; each round counts. In segments: slots (moves/segments.h)
  bool sum_is_exact = true;
  bool maxima_are_exact = true;

  // The traffic of the worst rank in one step, which need not be the worst rank of another step or of the plan.
  struct OfStep {
    int64_t received_bytes_max = 0;
    int64_t messages_max = 0;
    void add(const Traffic& traffic) {
      received_bytes_max = std::max(received_bytes_max, traffic.received_bytes);
      messages_max = std::max(messages_max, traffic.messages);
    }
  };
  // By step. Empty for plans in segments, and where several steps communicate and not all classes were examined.
  std::vector<OfStep> of_steps;
};

// The totals of one step or of a whole plan; the maxima of a plan are over ranks' sums over steps. Ranks are divided
// into classes by the coordinates on which their figures depend (moves/extremes.h). With up to kMaxRanksWalked classes,
// one rank of each is examined, and everything is exact. With more, maxima are those of outermost and boundary
// coordinates: exact if no rank can have more, otherwise lower bounds. The sum is then computed without visiting ranks,
// or is an upper bound. Between two meshes all ranks are examined, and everything is exact.
TrafficTotals totals(const Step& step, Lowering lowering);
TrafficTotals totals(const Plan& plan);

// Lower bounds on the bytes received, for any plan. Without P, a rank must receive what it needs and does not hold.
// With P, over all ranks, each element takes at least (contributions - 1) + (destination holders - 1) transfers, and
// bytes_max is the mean of that over ranks. For two meshes, see exchange/bounds.h.
struct Bound {
  int64_t bytes_max = 0;
  int64_t bytes_sum = 0;
};

Bound lower_bound(const Layout& src, const Layout& dst);

}  // namespace shardwright
