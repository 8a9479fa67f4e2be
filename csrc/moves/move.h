// Finds the single move that takes a tensor from one layout to another, if there is one.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "moves/step.h"

namespace shardwright {

// Returns the step, or nullopt if the layouts are equal or need several moves. If `allowed` is not empty, a step that
// communicates must span one of these sets of mesh dims.
//
//   no reduction        slice, if each rank holds what it needs; else exchange, along the mesh dims that data moves
//                       along, or the smallest allowed set that includes them
//   some reductions     all_reduce, if nothing else changes; reduce_scatter, if the reduced mesh dims become cuts and
//                       nothing else changes
std::optional<Step> move_between(const Layout& before, const Layout& after,
                                 const std::vector<MeshDimSet>& allowed = {});

// Names an exchange after the equivalent native collective, if there is one: all_gather, all_to_all or permute.
Step named_by_collective(Step step);

// Lets replicas share the sending of an exchange, and includes them in its group, if that reduces the bytes or messages
// that the worst rank sends. Otherwise returns the step unchanged. Does not change groups of more than
// MeshExchange::kMaxSharingGroup ranks, whose pairs would have to be visited one by one, nor steps whose set of mesh
// dims is not in `allowed`.
Step with_policy_if_cheaper(Step step, ReplicaPolicy policy, const std::vector<MeshDimSet>& allowed);

}  // namespace shardwright
