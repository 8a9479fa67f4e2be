#include "moves/plan.h"

#include "support/names.h"

namespace shardwright {

Objective parse_objective(const std::string& name) {
  return parse_name("objective", name, Objective::kBytes, objective_name);
}

const char* objective_name(Objective objective) { return objective == Objective::kTime ? "time" : "bytes"; }

}  // namespace shardwright
