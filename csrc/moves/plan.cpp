#include "moves/plan.h"

#include "support/error.h"
#include "support/names.h"

namespace shardwright {

Objective parse_objective(const std::string& name) {
  return parse_name("objective", name, Objective::kBytes, objective_name);
}

const char* objective_name(Objective objective) { return objective == Objective::kTime ? "time" : "bytes"; }

bool crosses(const Plan& plan) { return !(plan.src.mesh() == plan.dst.mesh()); }

std::string ends_of(const Plan& plan) {
  const std::string on = crosses(plan) ? concat(" on ", plan.dst.mesh().to_string()) : "";
  return concat(plan.src.to_string(), " -> ", plan.dst.placements_string(), on);
}

std::vector<Rank> ranks_of(const Plan& plan) { return ranks_of(plan.src.mesh(), plan.dst.mesh()); }

}  // namespace shardwright
