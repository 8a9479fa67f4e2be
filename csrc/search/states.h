// The intermediate layouts that the search between two layouts considers.
#pragma once

#include <vector>

#include "moves/move_table.h"

namespace shardwright {

// Returns the states of the search, each once, without pending reductions, in an order that depends on `src` and `goal`
// alone. Only the mesh dims `free` may cut. `table` numbers the lists of cuts; new lists are added to it.
//
// A state is a list of cuts for each tensor dim. With up to three mesh dims all lists are considered: every order, and
// for each cut every split factor that can result if earlier mesh dims are gathered or do not cut yet. With more mesh
// dims, a mesh dim cuts as in the source, as in the goal, innermost, or not at all. Lists of unequal parts are left out
// if equal parts suffice, and so are strided cuts into very many pieces.
std::vector<MoveTable::State> states_between(const Layout& src, const Layout& goal, MeshDimSet free, MoveTable& table);

}  // namespace shardwright
