#include "moves/plan.h"

#include <algorithm>

#include "support/names.h"

namespace shardwright {

Objective parse_objective(const std::string& name) {
  return parse_name("objective", name, Objective::kBytes, objective_name);
}

std::vector<Rank> ranks_of(const Plan& plan) {
  std::vector<Rank> ranks = plan.src.mesh().ranks();
  const std::vector<Rank> others = plan.dst.mesh().ranks();
  ranks.insert(ranks.end(), others.begin(), others.end());
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

const char* objective_name(Objective objective) { return objective == Objective::kTime ? "time" : "bytes"; }

}  // namespace shardwright
