// What moves send and receive: exact counts for one rank, totals over all, and what no plan can go below.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "moves/exchange.h"
#include "moves/plan.h"

namespace shardwright {

// Of any step.
class StepTraffic {
 public:
  StepTraffic(const Step& step, Backend backend);
  Traffic at(int64_t position) const;
  // The mesh dims whose coordinates at() depends on.
  MeshDimSet varying_dims() const;
  const Step& step() const { return step_; }

 private:
  const Step& step_;
  ExchangeTraffic exchange_;
  bool is_native_;
};

Traffic traffic_at(const Step& step, Backend backend, int64_t position);

struct TrafficTotals {
  int64_t received_bytes_max = 0;
  int64_t received_bytes_sum = 0;
  int64_t sent_bytes_max = 0;
  int64_t messages_max = 0;
  int64_t steps = 0;  // those that communicate, rounds counted
  bool sum_is_exact = true;
};

// Of one step, and of the whole plan (maxima are of ranks' sums over steps). Ranks are told apart by the coordinates
// that their figures depend on; where these have up to kMaxRanksWalked combinations, all are looked at. For more,
// maxima are taken over the corners of the mesh, and the sum is worked out without a walk, or else is an upper bound:
// then sum_is_exact is false.
constexpr int64_t kMaxRanksWalked = 4096;
std::vector<int64_t> seen_positions(const Mesh& mesh);
// The positions in position 0's group over `mesh_dims` whose coordinates are first or last: of the first mesh dims,
// where all would be more than `at_most`.
std::vector<int64_t> corner_positions(const Mesh& mesh, MeshDimSet mesh_dims, size_t at_most);
std::vector<int64_t> corner_positions(const Mesh& mesh);
TrafficTotals totals(const Step& step, Backend backend);
TrafficTotals totals(const Plan& plan);

// What no plan can go below. Without P a rank must receive what it needs and does not hold. With P, over all ranks,
// each element takes at least (contributions - 1) + (destination holders - 1) transfers, and bytes_max is the
// mean of that.
struct Bound {
  int64_t bytes_max = 0;
  int64_t bytes_sum = 0;
};

Bound lower_bound(const Layout& src, const Layout& dst);

}  // namespace shardwright
