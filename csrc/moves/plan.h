// A plan: the moves that take a tensor from one layout to another, and what they cost.
//
// A plan is a function of the two global layouts and the options alone, so every rank computes the same one without
// communicating.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cost/topology.h"
#include "moves/step.h"

namespace shardwright {

// What a plan is chosen for. kTime: predicted time, then fewest steps and messages. kBytes: bytes received by the worst
// rank, then steps, then messages; they differ, because small messages cost more than their bytes.
enum class Objective : uint8_t { kTime, kBytes };

Objective parse_objective(const std::string& name);  // "time" or "bytes"; throws UserError
const char* objective_name(Objective objective);

struct Plan {
  Layout src;
  Layout dst;
  Lowering lowering = Lowering::kNccl;
  Objective objective = Objective::kTime;
  Topology topology;
  // Moves keep to process groups over sets of mesh dims that were named; else smaller ones may be made for sparse
  // moves.
  bool named_groups_only = false;
  std::vector<Step> steps;
};

// All that have something to do with a plan: those of the meshes of source and destination, ascending.
std::vector<Rank> ranks_of(const Plan& plan);

}  // namespace shardwright
