// The intermediate layouts that the search between two layouts considers.
#pragma once

#include <vector>

#include "moves/move_table.h"

namespace shardwright {

// Returns each state once, without pending reductions, in an order that depends on the two ends alone. `free` are the
// mesh dims that may cut.
//
// A state is a list of cuts for each tensor dim. With up to three mesh dims all lists are considered: every order, and
// for each cut every split factor that can result when mesh dims before it are gathered or do not cut yet. With more
// mesh dims, only lists that can be read off the two ends are: a mesh dim cuts as in the source, as in the goal,
// innermost, or not at all. Lists of unequal parts are left out where equal ones will do, and so are strided cuts into
// very many pieces.
std::vector<MoveTable::State> states_between(const Layout& src, const Layout& goal, MeshDimSet free, MoveTable& table);

}  // namespace shardwright
