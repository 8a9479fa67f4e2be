// Splits one mesh dim into several, on the same ranks, so that moves may span a part of it.
//
//   b = 2048     as [R]         b.0 = 256, b.1 = 8     as [R, R]         the same parts
//                               b.0 = 256, b.1 = 8     as [S(0), S(0)]   gathered over b.1, then over b.0, in
//                                                                        7 + 255 messages instead of 2,047
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// Returns the layout with the same parts in which `mesh_dim` is split into mesh dims of these sizes, outermost first.
// Each size must be above 1, and their product must be the size of `mesh_dim`. `mesh_dim` must cut nothing and must not
// be pending; otherwise throws InvariantError. The new mesh dims are named as the old one, followed by ".0", ".1" and
// so on. Returns nullopt if the mesh already has a dim of such a name.
std::optional<Layout> split(const Layout& layout, int mesh_dim, const std::vector<int64_t>& sizes);

// The inverse of split(): returns the layout on `mesh` with the same parts as `layout`. Returns nullopt unless the mesh
// of `layout` is `mesh` with some dims split, and `layout` is replicated over the split dims.
std::optional<Layout> joined(const Layout& layout, const MeshPtr& mesh);

// Returns the ways to split a mesh dim, each as a list of sizes, outermost first. The first ways give the ranks of a
// node (`ranks_per_node` consecutive ranks) a mesh dim of their own. With 0 there are no such ways. The other ways
// split into about equal sizes, if the mesh dim has more than 8 ranks. Returns no ways if its size is prime.
std::vector<std::vector<int64_t>> ways_to_split(const Mesh& mesh, int mesh_dim, int64_t ranks_per_node);

}  // namespace shardwright
