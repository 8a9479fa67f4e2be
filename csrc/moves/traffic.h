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
#include "moves/plan.h"
#include "moves/rank_classes.h"

namespace shardwright {

// The traffic of a step on one mesh, by position. Reductions are included; crossings and rearrangements are not.
class MeshStepTraffic {
 public:
  // The step must outlive the object.
  MeshStepTraffic(const Step& step, Lowering lowering);
  // Returns the traffic of the rank at a position, in all rounds.
  Traffic at(int64_t position) const;
  // Splits the classes of ranks so that at() is the same for all ranks of a class.
  void split_classes(RankClasses& classes) const;
  // Returns an upper bound on at() of every rank; nullopt if none is known, as for unequal parts.
  std::optional<Traffic> upper_bound() const;
  const Step& step() const { return step_; }

 private:
  const Step& step_;
  MeshExchange exchange_;
  bool is_native_;
};

// The traffic of any step, by rank.
class StepTraffic {
 public:
  // The step must outlive the object.
  StepTraffic(const Step& step, Lowering lowering);
  // Returns the traffic of a rank in all rounds. It is zero if the rank is not on the step's meshes.
  Traffic at(Rank rank) const;
  // Returns true if some rank sends something; see communicates() below.
  bool communicates() const;

 private:
  const Step& step_;
  std::unique_ptr<const Exchange> exchange_;  // only for crossings and rearrangements; else null
  std::optional<MeshStepTraffic> on_mesh_;    // only for other steps
};

// Returns the traffic of one rank in a step, or in all steps of a plan. It is zero if the rank is not on the step's
// mesh, or on neither mesh of a crossing.
Traffic traffic_at(const Step& step, Lowering lowering, Rank rank);
Traffic traffic_at(const Plan& plan, Rank rank);

// Returns true if some rank sends something: always if the step is not local, except for a crossing or rearrangement
// in which every rank already holds what it needs.
bool communicates(const Step& step);

// The traffic of a step or a plan over all ranks. `_max` is the largest count of a rank, `_sum` the sum over ranks. The
// maxima may be of different ranks.
struct TrafficTotals {
  int64_t received_bytes_max = 0;
  int64_t received_bytes_sum = 0;
  int64_t sent_bytes_max = 0;
  int64_t messages_max = 0;  // messages received
  int64_t sent_messages_max = 0;
  int64_t steps = 0;  // steps that communicate, each round counted; with segments, pipeline stages (moves/segments.h)
  bool sum_is_exact = true;      // false: the sum is an upper bound
  bool maxima_are_exact = true;  // false: the maxima are lower bounds

  // The traffic of the worst rank in one step. Another rank may be the worst in another step or in the plan.
  struct OfStep {
    int64_t received_bytes_max = 0;
    int64_t messages_max = 0;
    void add(const Traffic& traffic) {
      received_bytes_max = std::max(received_bytes_max, traffic.received_bytes);
      messages_max = std::max(messages_max, traffic.messages);
    }
  };
  // Includes `count` ranks with this traffic in the maxima and the sum.
  void add(const Traffic& traffic, int64_t count = 1) {
    received_bytes_max = std::max(received_bytes_max, traffic.received_bytes);
    received_bytes_sum += traffic.received_bytes * count;
    sent_bytes_max = std::max(sent_bytes_max, traffic.sent_bytes);
    messages_max = std::max(messages_max, traffic.messages);
    sent_messages_max = std::max(sent_messages_max, traffic.sent_messages);
  }

  // Indexed by step. Empty for plans in segments, and if several steps communicate and not all classes were examined.
  std::vector<OfStep> of_steps;
};

// Returns the totals of one step or of a whole plan. The maxima of a plan are over each rank's sum over steps. Ranks
// are divided into classes by the coordinates on which their traffic depends (moves/rank_classes.h). With up to
// kMaxRanksExamined classes, one rank of each is examined, and everything is exact. With more, the maxima are those of
// outermost and boundary coordinates: exact if no rank can have more, otherwise lower bounds. The sum is then computed
// without visiting ranks, or is an upper bound. Between two meshes all ranks are examined, and everything is exact.
TrafficTotals totals(const Step& step, Lowering lowering);
TrafficTotals totals(const Plan& plan);

// Lower bounds on the bytes received, for any plan. Without P, a rank must receive the elements that it needs and does
// not hold. If no P is reduced and mesh dims become P, the bounds are 0 if one of these mesh dims cuts the source;
// otherwise they are divided by the number of ranks along these mesh dims, which may hold any shares of a value. If a P
// is reduced, each element takes at least (contributions - 1) + (destination replicas - 1) transfers over all ranks,
// and bytes_max is the mean of that over ranks. For two meshes, see exchange/bounds.h.
//
// Example: 8 rows over 4 ranks.
//   S(0) -> R     each rank lacks 6 of 8 rows: bytes_max is the size of 6 rows, bytes_sum of 24
//   P -> S(0)     4 contributions, 1 replica, so 3 transfers per row: bytes_sum is 24 rows, bytes_max 24 / 4 = 6 rows
//
// Example: 8 rows over 2 x 4 ranks.
//   S(0),R -> R,P each rank lacks 4 of 8 rows, and may receive 1 of these: bytes_max is 1 row, bytes_sum 8 rows
struct Bound {
  int64_t bytes_max = 0;  // by the worst rank
  int64_t bytes_sum = 0;  // by all ranks
};

// Returns the bounds for plans from `src` to `dst`.
Bound lower_bound(const Layout& src, const Layout& dst);

}  // namespace shardwright
