// The intermediate layouts that the search between two layouts considers.
#pragma once

#include <vector>

#include "moves/move_table.h"

namespace shardwright {

// Returns the states of the search, at most 20,000, each once, without pending reductions, in an order that depends on
// the layouts and `free` alone. Only the mesh dims `free` may cut. `table` numbers the lists of cuts; new lists are
// added to it.
//
// A state is a list of cuts for each tensor dim. With up to three mesh dims all lists are considered: every order, and
// for each cut every split factor that can result if earlier mesh dims are gathered or do not cut yet. With more mesh
// dims, a mesh dim cuts as in the source, as in the goal, or not at all; with four, it may also cut any tensor dim
// innermost. A tensor dim has at most about 512 lists. Lists of unequal parts are excluded if equal parts suffice,
// and so are strided cuts into very many pieces.
//
// Example: 8 rows on a=2, b=2. The states are the lists
//   S(0) over a, then b     S(0) over b, then a     S(0) over a     SS(0,2) over a     S(0) over b     SS(0,2) over b
//   and no cut. SS(0,2) over a is left if b is gathered from the list S(0) over b, then a.
std::vector<MoveTable::State> states_between(const Layout& src, const Layout& goal, MeshDimSet free, MoveTable& table);

}  // namespace shardwright
