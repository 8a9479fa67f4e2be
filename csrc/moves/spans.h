// Lists of cuts compared: which name the same parts, and along which mesh dims data must travel between two.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/layout.h"

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

}  // namespace shardwright
