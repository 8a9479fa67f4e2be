// Meshes of the same ranks in which one mesh dim is several, so that moves may go over a part of it.
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

// Returns the layout that has the same parts where mesh dim `mesh_dim`, which must cut nothing and not be pending, is
// several of these sizes, each above 1. Their names are that of the mesh dim and a number; returns nullopt if the mesh
// has such names already.
std::optional<Layout> split(const Layout& layout, int mesh_dim, const std::vector<int64_t>& sizes);

// Returns the layout on `mesh` that has the same parts as one on a mesh in which dims of `mesh` are split. Returns
// nullopt if that mesh is no such mesh, or if what was split is not all replicated.
std::optional<Layout> joined(const Layout& layout, const MeshPtr& mesh);

// Returns sizes into which a mesh dim may be split: first so that ranks on one node, of `ranks_per_node` consecutive
// ranks, have a mesh dim of their own, then evenly.
std::vector<std::vector<int64_t>> ways_to_split(const Mesh& mesh, int mesh_dim, int64_t ranks_per_node);

}  // namespace shardwright
