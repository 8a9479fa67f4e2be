// The layouts that a search between two others may pass through.
#pragma once

#include <vector>

#include "moves/move_table.h"

namespace shardwright {

// By their cuts, without pending reductions, each once, in an order that depends on the ends alone. `free`: the mesh
// dims that may cut.
//
// A state gives each tensor dim a list of cuts. With up to three mesh dims these are all lists: every order, and with
// every cut the split factors that mesh dims gathered, or not yet cut, before it leave. With more they are those that
// can be read off the two ends: a mesh dim cuts as the source does, as the goal does, or innermost, or not at all.
// Left out are lists of unequal parts where equal ones will do, and strided cuts of very many pieces.
std::vector<MoveTable::State> states_between(const Layout& src, const Layout& goal, MeshDimSet free, MoveTable& table);

}  // namespace shardwright
