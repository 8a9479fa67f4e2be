// One move: what gets a tensor from one layout to another in a single step, if anything does.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "moves/step.h"

namespace shardwright {

// The step. Nothing where the layouts are equal and where it takes more than one move. With `allowed` not empty, the
// step spans one of these sets of mesh dims, or none is found.
//
//   no reduction        slice, where each rank holds what it needs; else exchange, along the mesh dims that cut what
//                       is held and must be spanned
//   some reductions     all_reduce, if nothing else changes; reduce_scatter, if the reduced mesh dims cut what is held
//                       and nothing else changes
std::optional<Step> move_between(const Layout& before, const Layout& after,
                                 const std::vector<MeshDimSet>& allowed = {});

// An exchange by the name of the native collective that does it, where one does: all_gather, all_to_all, permute.
Step named_by_collective(Step step);

// The exchange with its sending shared among replicas, which the group then spans, where that lessens what the worst
// rank sends; else as it is. Not for groups of more than kMaxSharingGroup ranks, which are walked pair by pair, nor
// where `allowed` has no such set.
Step shared_if_it_helps(Step step, Sharing sharing, const std::vector<MeshDimSet>& allowed);

}  // namespace shardwright
