// A plan: the moves that take a tensor from one layout to another.
//
// A plan depends only on the two global layouts and the options, so every rank computes the same one without
// communication.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cost/topology.h"
#include "moves/step.h"

namespace shardwright {

// The quantity that a plan minimises. kTime: predicted time, then steps, then messages. kBytes: bytes received by the
// worst rank, then steps, then messages. The two differ, because small messages cost more than their bytes.
enum class Objective : uint8_t { kTime, kBytes };

Objective parse_objective(const std::string& name);  // "time" or "bytes"; throws UserError
const char* objective_name(Objective objective);

// Into how many segments of a tensor dim, as equal as parts allow, a plan divides the tensor. Each takes all steps, and
// the next one takes a step while the one before it takes the following one (moves/segments.h). Only plans between two
// meshes have more than one segment.
struct Segments {
  int tensor_dim = 0;
  int64_t count = 1;
  bool operator==(const Segments&) const = default;
};

struct Plan {
  Layout src;
  Layout dst;
  Lowering lowering = Lowering::kNccl;
  Objective objective = Objective::kTime;
  Topology topology;
  // Moves only use process groups over sets of mesh dims that the user named. Otherwise smaller groups may be made for
  // sparse moves.
  bool named_groups_only = false;
  std::vector<Step> steps;
  Segments segments = {};
};

// Returns whether source and destination lie on different meshes. Then one step leads from the one to the other.
bool crosses(const Plan& plan);

// "float32[8, 4] on dp=2 as [S(0)] -> [R]", with the mesh of the destination where it is another.
std::string ends_of(const Plan& plan);

// All that have something to do with a plan: those of the meshes of source and destination, ascending.
std::vector<Rank> ranks_of(const Plan& plan);

}  // namespace shardwright
