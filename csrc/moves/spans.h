// Compares lists of cuts of one tensor dim: equality of their parts, and the mesh dims that a move from one list to the
// other must *span*. A move spans mesh dims if ranks exchange data only with ranks that differ only in these mesh dims.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// Returns the canonical form of a list of cuts of n elements. Lists that make the same parts of equal size, by chunks
// and strided cuts, have one form. Example: SS(0,|b|) over a, then S(0) over b, becomes S(0) over b, then over a. If
// parts differ in size, the order of the cuts does not change, so lists that make the same parts may keep several
// forms.
std::vector<Cut> canonical(const Mesh& mesh, int64_t n, std::vector<Cut> cuts);

// Returns true if every rank holds the same elements in the same order in both layouts, which are of one shape on one
// mesh. Ignores pending reductions. Compares the canonical lists of cuts. If they differ and have rules other than
// chunks and strided cuts, compares the parts of up to 2^16 ranks. A result of false may be wrong for more ranks, and
// for chunks and strided cuts into unequal parts; true is always right.
bool same_parts(const Layout& a, const Layout& b);

// Returns true if each set of ranks with equal coordinates on `kept` together holds the same elements of a tensor dim
// of n elements before and after. A result of false may be wrong; true is always right.
bool hold_same_elements(const Mesh& mesh, int64_t n, const std::vector<Cut>& before, const std::vector<Cut>& after,
                        MeshDimSet kept);

// Returns the mesh dims that a move of one tensor dim from `before` to `after` must span. Ranks that differ only in
// these mesh dims together hold all elements that each of them needs. If a list is not canonical, the result may have
// more mesh dims than necessary.
//
// Example: 8 rows on a=2, b=2.
//   S(0) over a, then b  ->  S(0) over a        spans b: the cut by a is common
//   S(0) over a, then b  ->  SS(0,2) over b     spans a: once a is gathered, rank b has rows 2b, 2b+1, 2b+4 and 2b+5
//   S(0) over a          ->  S(0) over b        spans a and b
MeshDimSet spanned_dims(const Mesh& mesh, int64_t n, const std::vector<Cut>& before, const std::vector<Cut>& after);

}  // namespace shardwright
