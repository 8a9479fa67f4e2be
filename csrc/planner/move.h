// One move: what gets a tensor from one layout to another in a single step, if anything does.
#pragma once

#include <optional>

#include "planner/plan.h"

namespace shardwright {

// The cuts of a tensor dim of n elements by their one name among those for the same parts: S(0) over b, then over a, is
// also SS(0,|b|) over a, then S(0) over b. Only where all parts have one size; other cuts stay as they are.
std::vector<Cut> canonical(const Mesh& mesh, int64_t n, std::vector<Cut> cuts);

// Whether every rank holds the same elements in both, by this name.
bool same_parts(const Layout& a, const Layout& b);

// Whether ranks that agree on `kept` hold the same of a tensor dim of n elements before and after, all such ranks taken
// together. May say no where it is so, never yes where it is not.
bool holds_the_same(const Mesh& mesh, int64_t n, const std::vector<Cut>& before, const std::vector<Cut>& after,
                    MeshDimSet kept);

// Mesh dims that a move from `before` to `after` spans for the sake of this tensor dim, both canonical: ranks that
// agree outside them hold together all that each of them needs.
MeshDimSet spanned_dims(const Mesh& mesh, int64_t n, const std::vector<Cut>& before, const std::vector<Cut>& after);

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
constexpr int64_t kMaxSharingGroup = 64;
Step shared_if_it_helps(Step step, Sharing sharing, const std::vector<MeshDimSet>& allowed);

}  // namespace shardwright
