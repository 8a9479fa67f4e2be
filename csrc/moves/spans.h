// Compares lists of cuts: which ones make the same parts, and along which mesh dims data must travel between two.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// Returns the canonical list among the lists of cuts of a tensor dim of n elements that make the same parts: S(0) over
// b, then over a, makes the same parts as SS(0,|b|) over a, then S(0) over b. Only lists with parts of one size are
// changed; others are returned as they are.
std::vector<Cut> canonical(const Mesh& mesh, int64_t n, std::vector<Cut> cuts);

// Returns whether every rank holds the same elements in both, which are on one mesh, in the same places: judging by the
// canonical lists, and by the parts where there are rules that these do not name. On more than 2^16 ranks it may return
// false although they do.
bool same_parts(const Layout& a, const Layout& b);

// Returns whether each set of ranks that agree on `kept` together holds the same elements of a tensor dim of n elements
// before and after. It may return false although they do, but never true although they do not.
bool holds_the_same(const Mesh& mesh, int64_t n, const std::vector<Cut>& before, const std::vector<Cut>& after,
                    MeshDimSet kept);

// Returns the mesh dims that a move from `before` to `after`, both canonical, must span because of this tensor dim:
// ranks that agree on all other mesh dims together hold everything that each of them needs.
MeshDimSet spanned_dims(const Mesh& mesh, int64_t n, const std::vector<Cut>& before, const std::vector<Cut>& after);

}  // namespace shardwright
