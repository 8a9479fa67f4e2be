// Finds the single move that takes a tensor from one layout to another, if there is one.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "moves/step.h"

namespace shardwright {

// Returns the step between two layouts on one mesh. Returns nullopt if their parts and pending reductions are equal, if
// they need several moves, if `after` has a pending reduction that `before` lacks, or if no set in `allowed` fits. A
// step that communicates must be over one of these sets of mesh dims; if `allowed` is empty, over any set. A reduction
// is over exactly the mesh dims that it reduces.
//
//   no reduction        slice, if each rank already holds all elements of its part after; else exchange, over the mesh
//                       dims along which data is sent, or over the smallest allowed set that includes them
//   some reductions     all_reduce, if nothing else changes; reduce_scatter, if the reduced mesh dims become cuts and
//                       nothing else changes
std::optional<Step> move_between(const Layout& before, const Layout& after,
                                 const std::vector<MeshDimSet>& allowed = {});

// Returns an exchange under the name of the equivalent native collective, if there is one: all_gather, all_to_all or
// permute. Returns other steps, and exchanges whose replicas share the sending, unchanged. The name follows from the
// messages of position 0's group, and is for readers only.
Step named_by_collective(Step step);

// Returns the exchange in which replicas share the sending by `policy`, if the busiest rank then sends fewer bytes. The
// replicas join the exchange's group. Every pair of the larger group is visited, so it may have at most
// MeshExchange::kMaxSharingGroup ranks. Returns the step unchanged if it is not an exchange, if this does not help, if
// the larger group has too many ranks, or if its mesh dims are not in `allowed` (empty: any).
Step with_policy_if_cheaper(Step step, ReplicaPolicy policy, const std::vector<MeshDimSet>& allowed);

}  // namespace shardwright
