// Finds the single move that takes a tensor from one layout to another, if there is one.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "moves/step.h"

namespace shardwright {

// Returns the step, or nothing if the layouts are equal or more than one move is needed. If `allowed` is not empty, the
// step must span one of these sets of mesh dims.
//
//   no reduction        slice, where each rank holds what it needs; else exchange, along the mesh dims that cut what
//                       is held and must be spanned
//   some reductions     all_reduce, if nothing else changes; reduce_scatter, if the reduced mesh dims cut what is held
//                       and nothing else changes
std::optional<Step> move_between(const Layout& before, const Layout& after,
                                 const std::vector<MeshDimSet>& allowed = {});

// Names an exchange after the native collective that does the same, if there is one: all_gather, all_to_all or permute.
Step named_by_collective(Step step);

// Shares the sending of an exchange among replicas, which the group then spans, if that reduces what the worst rank
// sends; otherwise returns the step as it is. Groups of more than MeshExchange::kMaxSharingGroup ranks, whose pairs
// would have to be visited one by one, are left alone, and so are those whose set of mesh dims is not in `allowed`.
Step shared_if_it_helps(Step step, Sharing sharing, const std::vector<MeshDimSet>& allowed);

}  // namespace shardwright
