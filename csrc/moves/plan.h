// A plan: the moves that lead from one layout of a tensor to another.
//
// A plan depends only on the two global layouts and the options, so every rank computes the same plan without
// communication.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cost/topology.h"
#include "moves/step.h"

namespace shardwright {

// The quantity that a plan minimizes. kTime: predicted time, then steps, then messages. kBytes: bytes received by the
// worst rank, then steps, then messages. The two differ because small messages cost more than their bytes.
enum class Objective : uint8_t { kTime, kBytes };

Objective parse_objective(const std::string& name);  // "time" or "bytes"; throws UserError
const char* objective_name(Objective objective);

// A plan may move the tensor in segments of one tensor dim, as equal as parts allow. Each segment goes through all
// steps, as in a pipeline: while one segment is in a step, the next segment is in the step before it
// (moves/segments.h). Only plans between two meshes have more than one segment.
struct Segments {
  int64_t tensor_dim = 0;
  int64_t count = 1;
  bool operator==(const Segments&) const = default;
};

struct Plan {
  Layout src;
  Layout dst;
  Lowering lowering = Lowering::kNccl;     // the transport that carries out the steps
  Objective objective = Objective::kTime;  // the quantity that the plan was made to minimize
  Topology topology;                       // the links from which times are predicted
  // If true, moves only use process groups over sets of mesh dims that the user named. Otherwise sparse moves may
  // create smaller groups.
  bool named_groups_only = false;
  std::vector<Step> steps;  // in order; empty if every rank already holds exactly its destination part
  Segments segments = {};
};

// Returns true if source and destination are on different meshes. Then one step is a crossing or a
// rearrangement between them.
bool crosses(const Plan& plan);

// Returns source and destination as text: "float32[8, 4] on dp=2 as [S(0)] -> [R]". If the destination is on another
// mesh, " on " and this mesh follow.
std::string ends_of(const Plan& plan);

// Returns the ranks of the meshes of source and destination, ascending, each once.
std::vector<Rank> ranks_of(const Plan& plan);

}  // namespace shardwright
