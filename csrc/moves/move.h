// Finds the single move that takes a tensor from one layout to another, if there is one.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "moves/step.h"

namespace shardwright {

// Returns the step between two layouts on one mesh, or nullopt if the layouts are equal or need several moves. If
// `allowed` is not empty, a step that communicates must span one of these sets of mesh dims.
//
//   no reduction        slice, if each rank already holds all elements of its part after; else exchange, over the mesh
//                       dims along which data is sent, or over the smallest allowed set that includes them
//   some reductions     all_reduce, if nothing else changes; reduce_scatter, if the reduced mesh dims become cuts and
//                       nothing else changes
std::optional<Step> move_between(const Layout& before, const Layout& after,
                                 const std::vector<MeshDimSet>& allowed = {});

// Returns an exchange under the name of the equivalent native collective, if there is one: all_gather, all_to_all or
// permute. Returns other steps unchanged.
Step named_by_collective(Step step);

// Returns the exchange in which replicas share the sending by `policy`, if the busiest rank then sends fewer bytes. The
// replicas join the exchange's group. Returns the step unchanged if this does not help, if the larger group would have
// more than MeshExchange::kMaxSharingGroup ranks, because every pair would be visited, or if its mesh dims are not in
// `allowed` (empty: any).
Step with_policy_if_cheaper(Step step, ReplicaPolicy policy, const std::vector<MeshDimSet>& allowed);

}  // namespace shardwright
