// Checks plans that come from other processes or files: their steps must lead from source to destination, and each step
// must be a valid move of its kind (StepOp in moves/step.h).
#pragma once

#include "moves/plan.h"

namespace shardwright {

// Maximum number of steps of a plan that is read; no two layouts need as many.
constexpr size_t kMaxSteps = 30;

// Checks the meshes to which the steps of a plan lead. Throws UserError if a plan on one mesh leaves it, or if relays
// are not ranks of the source or the destination. Bytes of plans can have no other meshes.
void check_meshes(const Plan& plan);

// Checks the steps, meshes and segments of a plan. Throws a UserError that names the fault. A step is invalid if it
// begins with another layout than the previous step ends with, is not a valid move of its kind, or carries out a
// reduction that is pending in the destination.
void check_steps(const Plan& plan);

// Returns true if a step ends on another mesh than it begins on.
bool leads_to_another_mesh(const Step& step);

// Returns the mesh to which the last crossing of a plan leads: the destination's mesh, or one into which it is split
// (search/split.h). Without a crossing, returns the destination's mesh.
const Mesh& mesh_reached(const Plan& plan);

// Returns the meshes of relays (search/relays.h) in order. All crossings but the last one lead to them.
std::vector<MeshPtr> meshes_of_relays(const Plan& plan);

}  // namespace shardwright
