// Checks plans that come from elsewhere: their steps must lead from source to destination, and each must be the move
// that it claims to be.
#pragma once

#include "moves/plan.h"

namespace shardwright {

// More steps than any two layouts need.
constexpr size_t kMaxSteps = 30;

// Throws a UserError that names the first step that does not begin where the one before ends, that no single move of
// its name carries out, or that does a reduction which is still pending in the destination.
void check_steps(const Plan& plan);

// Returns whether a step ends on another mesh than it begins on.
bool leads_to_another_mesh(const Step& step);

// The mesh to which the last crossing of a plan leads: that of the destination, or one in which it is split
// (search/split.h). Without a crossing, the mesh of the destination.
const Mesh& mesh_reached(const Plan& plan);

// The meshes of relays (search/relays.h), to which all crossings but the last one lead, in this order.
std::vector<MeshPtr> meshes_of_relays(const Plan& plan);

}  // namespace shardwright
