// The exchange of a step: who sends which elements to whom in it.
#pragma once

#include <memory>

#include "exchange/exchange.h"
#include "exchange/grid_exchange.h"
#include "exchange/mesh_exchange.h"
#include "moves/step.h"

namespace shardwright {

// The step must not reduce. It must outlive the exchange.
std::unique_ptr<const Exchange> exchange_of(const Step& step);

// The same of a step that leads to another mesh.
GridExchange crossing_of(const Step& step);

// The exchange among the groups of a step on one mesh. That of a reduction tells which ranks hold and need what.
MeshExchange mesh_exchange_of(const Step& step);

}  // namespace shardwright
